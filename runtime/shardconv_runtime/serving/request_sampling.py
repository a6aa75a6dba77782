"""How each request of a batch draws its tokens, and which fields of a generation config can be granted.

transformers' loop has temperature, top_k and top_p of each request, and sorts the logits of all rows for
them. Here one processor chooses every token itself: it has the requests with their tokens, on all ranks, and
applies ``generate``'s own processors to the rows that ask for them. It leaves only the chosen token to the
loop. So a request gets the tokens that ``generate`` would give it, independent of the batch:
the most likely one is ``argmax``, ties included, and a request with a seed draws from its own generator.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Private, but nothing public lets a batch have a processor that knows the requests.
from transformers.generation.continuous_batching import cb_logits_processors

from ..errors import ShardconvError
from ..openai_api.schemas import DEFAULT_FIELDS, Sampling, TokenLogprob
from .grammars import NO_TOKEN, SLOW

HONORED = (*DEFAULT_FIELDS, "do_sample", "eos_token_id")
NOT_OF_TOKENS = (
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "max_length",
    "max_new_tokens",
    "use_cache",
    "cache_implementation",
    "transformers_version",
    "_from_model_config",
    "_attn_implementation",
    "disable_compile",
    "trust_remote_code",
)
"""Fields of a generation config that do not choose tokens, or that each request says for itself."""
ONE_ASKS_FOR_NOTHING = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "typical_p",
    "guidance_scale",
    "length_penalty",
    "num_beams",
    "num_return_sequences",
)
"""Fields whose value 1 means the same as an unset field."""

NOT_NUMBERS = "the model's logits are not numbers for this prompt"
REASONS = (NOT_NUMBERS, NO_TOKEN, SLOW)
"""Why a request failed."""


def default_sampling(own: Any, ignored: frozenset[str] = frozenset()) -> Sampling:
    """Return how tokens are drawn for requests that do not say: as the model's generation config says, or the
    API.
    """
    said = {name for name, value in own.to_diff_dict().items() if _chooses(name, value)}
    refused = sorted(said - {*HONORED, *ignored})
    if refused:
        raise ShardconvError(
            f"the model's generation_config.json has {', '.join(refused)}, which the server does not "
            "support: its answers would differ from those of generate; to ignore it, pass "
            f"--ignore {' '.join(refused)}"
        )
    defaults = {name: getattr(own, name) for name in DEFAULT_FIELDS}
    return Sampling(**{n: value for n, value in defaults.items() if value is not None and n not in ignored})


def _chooses(name: str, value: Any) -> bool:
    """Return whether a field of a generation config makes other tokens likely."""
    if name in NOT_OF_TOKENS or name.startswith(("output_", "return_")):
        return False
    if name in ONE_ASKS_FOR_NOTHING and value == 1:
        return False
    return bool(value) or (name.endswith("_token_id") and value == 0 and value is not False)


def serving_config(own: Any) -> GenerationConfig:
    """Return a generation config with which ``RequestProcessor`` chooses all tokens."""
    # The processor takes the place of the one that this penalty asks for; the other fields ask for nothing.
    warnings.filterwarnings("ignore", message="Passing `repetition_penalty` with `inputs_embeds`")
    cb_logits_processors.CLASSIC_TO_CB_PROCESSORS_MAP[RepetitionPenaltyLogitsProcessor] = RequestProcessor
    # The greatest score is the token that it chose. Drawing it would take a number for each other token.
    return GenerationConfig(do_sample=False, repetition_penalty=2.0, eos_token_id=own.eos_token_id or -1)


def processor_of(manager: Any) -> RequestProcessor:
    """Return the processor of a manager that was made by ``serving_config``."""
    processors = list(manager.logit_processor.logits_processor)
    if [type(each) for each in processors] != [RequestProcessor]:
        names = ", ".join(type(each).__name__ for each in processors)
        raise ShardconvError(f"the installed transformers chooses tokens by {names}; install another version")
    only: RequestProcessor = processors[0]
    return only


class RequestProcessor(cb_logits_processors.ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of each row as its request asks, and leaves no other.

    Attributes:
        logprobs: name of a watched request -> logarithmic probabilities of its tokens, if it asked for them.
        failed: names of watched requests whose logits were not numbers.
        failed_rows: name of a request -> why it failed in this step, if this rank has to tell rank 0; None if
            it cannot.
        grammars: follows JSON schemas; None if they are not supported.
        is_with_rank_0: rank 0 sees the notes of this rank; of stages, only the last one has logits.
    """

    supported_kwargs = {"sampling": Sampling, "num_prompt_tokens": int}  # noqa: RUF012 (as in the base class)
    ignored_kwargs = ()

    def __init__(self, processor: Any) -> None:
        self._requests: list[Any] = []
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.failed: set[str] = set()
        self.failed_rows: dict[str, str] | None = None
        self.is_with_rank_0 = True
        self.grammars: Any = None

    def of_other_requests(self) -> RequestProcessor:
        """Return a processor for requests outside of the batch, which makes the same notes."""
        other = RequestProcessor(None)
        other.logprobs, other.failed, other.grammars = self.logprobs, self.failed, self.grammars
        return other

    def watch(self, name: str) -> None:
        """Record the tokens of a request; nothing is recorded on ranks without a client."""
        self.logprobs[name] = []

    def forget(self, name: str) -> None:
        """Forget a request that is over; the loop may still compute another token of it."""
        self.logprobs.pop(name, None)
        self.failed.discard(name)

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fill the arguments of all rows, of which there are none."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Note the requests of the next step's rows, in order. Returns int32 ``[B]`` that nothing reads."""
        self._requests = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._requests), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Return scores ``[B, V]`` in which each row has one token, in their memory.

        Args:
            scores: float32 logits ``[B, V]``, the same on all ranks.
            tensor_arg: int32 ``[B]``, not read.
        """
        requests = self._requests
        rows = scores[: len(requests)]
        asked = [state.logit_processor_kwargs.get("sampling", _DEFAULT) for state in requests]
        # A row without a greatest number is that request's failure, and must not end the loop of all. Its
        # tokens until rank 0 cancels it are of no use, but the same on all ranks.
        self._set_failed_rows(rows)
        is_plain = all(
            each.is_greedy and not each.changes_scores and each.constraint is None for each in asked
        )
        adjusted = rows if is_plain else rows.clone()
        lost = set()
        for row, (state, sampling) in enumerate(zip(requests, asked, strict=True)):
            if sampling.changes_scores:
                adjusted[row] = _adjusted(adjusted[row], state, sampling)
            if sampling.constraint is not None:
                followed = self._followed(state, sampling)
                adjusted[row] = self.grammars.allowed(adjusted[row], followed)
                if followed.is_slow:
                    self._fail(state, SLOW)
                if adjusted[row].amax() == -torch.inf:
                    lost.add(row)
                    self._fail(state, NO_TOKEN)
                    adjusted[row] = 0.0
        if not is_plain:
            self._set_failed_rows(adjusted)
        chosen = adjusted.argmax(-1)
        drawn = [row for row, sampling in enumerate(asked) if not sampling.is_greedy]
        if drawn:
            # Rows that ask for the same go through generate's processors together.
            for settings in dict.fromkeys(asked[row].warping for row in drawn):
                alike = [row for row in drawn if asked[row].warping == settings]
                adjusted[alike] = _warped(adjusted[alike], settings)
            probabilities = adjusted[drawn].softmax(-1)
            chosen[drawn] = torch.multinomial(probabilities, 1).squeeze(-1)
            for index, row in enumerate(drawn):
                if asked[row].seed is not None:
                    generator = _generator(requests[row], asked[row].seed, probabilities[index])
                    chosen[row] = torch.multinomial(probabilities[index], 1, generator=generator)
        for row, (state, sampling) in enumerate(zip(requests, asked, strict=True)):
            follows = sampling.constraint is not None and row not in lost
            if follows and not self._followed(state, sampling).accept(int(chosen[row])):
                self._fail(state, NO_TOKEN)
            noted = self.logprobs.get(state.request_id)
            if sampling.num_logprobs is not None and noted is not None:
                noted.append(_logprob(rows[row], int(chosen[row]), sampling.num_logprobs))
        # In a step of parts of prompts, some rows do not give a request its next token: they are not changed.
        rows.fill_(-torch.inf)
        rows[torch.arange(len(requests), device=scores.device), chosen] = 0.0
        return scores

    def _set_failed_rows(self, scores: Tensor) -> None:
        """Note requests whose scores ``[B, V]`` have no greatest number, and give their tokens equal ones."""
        for row in (~scores.amax(-1).isfinite()).nonzero().flatten().tolist():
            self._fail(self._requests[row], NOT_NUMBERS)
            scores[row] = 0.0

    def _fail(self, state: Any, reason: str) -> None:
        """Note that a request failed, so that rank 0 tells the client and cancels it."""
        name = state.request_id
        if self.is_with_rank_0:
            self.note_failure(name, REASONS.index(reason))
        elif self.failed_rows is None:
            raise ShardconvError(f"{name}: {reason}")
        else:
            self.failed_rows.setdefault(name, reason)

    def take_failure(self, name: str) -> int | None:
        """Return the number of the reason why a request failed since the last call, for ``note_failure``."""
        reason = (self.failed_rows or {}).pop(name, None)
        return None if reason is None else REASONS.index(reason)

    def note_failure(self, name: str, number: int) -> None:
        """Note on rank 0 why a request that is watched failed; the first reason counts."""
        if name not in self.logprobs:
            return
        if REASONS[number] == NOT_NUMBERS:
            self.failed.add(name)
        else:
            self.grammars.failures.setdefault(name, REASONS[number])

    def _followed(self, state: Any, sampling: Sampling) -> Any:
        """Return the object that follows the schema of a request, which is kept with it."""
        if _FOLLOWED not in vars(state):
            answer = _tokens(state)[1]
            vars(state)[_FOLLOWED] = self.grammars.follow(sampling.constraint, sampling.grammar, answer)
        return vars(state)[_FOLLOWED]


_DEFAULT = Sampling()
_GENERATOR, _FOLLOWED = "_shardconv_generator", "_shardconv_followed"
"""Attributes of a request's state in transformers' loop, which goes with the request."""


def _tokens(state: Any) -> tuple[list[int], list[int]]:
    """Return prompt and answer so far; a request that was taken out of the cache begins again with both."""
    end = state.logit_processor_kwargs["num_prompt_tokens"]
    return state.initial_tokens[:end], state.initial_tokens[end:] + state.generated_tokens


def _adjusted(scores: Tensor, state: Any, sampling: Sampling) -> Tensor:
    """Return the scores ``[V]`` with the request's bias and penalties, in ``generate``'s order."""
    prompt, answer = _tokens(state)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        scores = scores.index_add(0, scores.new_tensor(ids, dtype=torch.long), scores.new_tensor(values))
    if sampling.repetition_penalty != 1:
        seen = torch.tensor([prompt + answer], device=scores.device)
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores[None])[0]
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(answer)
        lost = [sampling.presence_penalty + sampling.frequency_penalty * n for n in counts.values()]
        scores = scores.index_add(0, scores.new_tensor([*counts], dtype=torch.long), -scores.new_tensor(lost))
    return scores


def _warped(scores: Tensor, settings: tuple[float, int, float, float]) -> Tensor:
    """Return scores ``[B, V]`` of tokens that may be drawn, by ``generate``'s processors in order."""
    temperature, top_k, top_p, min_p = settings
    ids = torch.empty(scores.size(0), 0, dtype=torch.long, device=scores.device)  # they read none
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores


def _generator(state: Any, seed: int, like: Tensor) -> torch.Generator:
    """Return the generator of a request's draws, which is kept with it."""
    generator: torch.Generator | None = vars(state).get(_GENERATOR)
    if generator is None:
        generator = torch.Generator(like.device).manual_seed(seed)
        # A request that begins again has drawn before: a draw takes as many numbers as there are tokens.
        for _ in _tokens(state)[1]:
            torch.empty_like(like).exponential_(generator=generator)
        vars(state)[_GENERATOR] = generator
    return generator


def _logprob(scores: Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = scores.float().log_softmax(-1)
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
