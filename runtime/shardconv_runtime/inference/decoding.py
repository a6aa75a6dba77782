"""``generate`` of a compiled model: a prefill, then the same graph for each token.

The step from one token to the next is one graph: the model's own preparation of its inputs, its forward pass,
the choice of the token, and the test whether all rows have ended. It reads and writes buffers that stay, of a
bucket (batch and length, rounded up), so that calls with other prompts run the same graph. On GPUs it is
recorded and replayed; elsewhere the compiled function is called, and its guards are evaluated twice a call.

Greedy decoding and sampling take this way if the model allows it. To find out, the logits of the first step
in each bucket are compared with the logits of the model's ordinary step. For other ways of decoding
``generate`` runs transformers' own loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.generation import GenerationMode

from ..comm.deadline import pause, progress
from ..errors import ShardconvError
from ..parallel.boundary import given_cache
from ..parallel.fused_products import refresh_fused
from .decode_attention import attending_once
from .decode_cache import Buffers, is_known, make_cache, num_tokens, windows
from .decode_calls import Call, may_take, options_of, prepared_call
from .decode_state import Bucket, StepState, make_state, start_call
from .replay import WARM_UP_RUNS, CompiledStep, Replay, StopFlag
from .sampling import choose

LEAST_SLOTS, SLOTS_STEP = 128, 2048
ROWS_STEP = 8
"""Lengths and batches are rounded up to powers of two, from SLOTS_STEP and ROWS_STEP on to multiples."""

LEAST_REACH = 2048
"""Fewest slots that a step reads. A longer text gets a graph with twice the reach each time that it is full.
Below this number all slots together are few bytes compared with the weights, and not worth a graph."""

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference between the first step's logits, in float32, and an ordinary step's logits, relative to
their norm."""

TOLERANCE = 0.05
"""The tolerance in lower precision."""

COUNTED = "position_ids"
CONSTANT = ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Tensor arguments of a step that count its tokens, or stay as they are (a mask, as long as the cache)."""

NOT_ONE_GRAPH = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
"""Errors of Dynamo if code cannot be captured as one graph."""

Forward = Callable[..., Any]


class Decoder:
    """Decodes for one model.

    Attributes:
        runs_plain: the model is being called by this class, for a prefill or an ordinary step.
        num_recordings: the number of recorded steps since the model was loaded.
    """

    def __init__(
        self, model: nn.Module, forward: Forward, compile: Callable[[Any], Any], *, records: bool
    ) -> None:
        self._model: Any = model
        self._forward = forward
        self._step = CompiledStep(_step, compile)
        self._records = records
        self._buffers = Buffers(next(model.parameters()).device)
        self._recorded: dict[Bucket, tuple[StepState, list[Replay]]] = {}
        self._generation = 0
        self._addresses: tuple[int, ...] = ()
        self._unfit: set[Any] = set()
        self._attends_once = True
        self._least_slots = LEAST_SLOTS
        self.runs_plain = False
        self.num_recordings = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a model is not compiled."""

    @contextmanager
    def options_for(self, arguments: dict[str, Any]) -> Iterator[Callable[..., Any] | None]:
        """Yield the decoding method for ``generate``'s ``custom_generate``; None for its own.

        The model's default of a static cache is left out if ``generate`` would refuse the call for it.
        """
        defaults = self._model.generation_config
        cache = defaults.cache_implementation
        options = options_of(self._model, arguments)
        mode = options.get_generation_mode(arguments.get("assistant_model"))
        if mode is GenerationMode.ASSISTED_GENERATION or given_cache(arguments) is not None:
            defaults.cache_implementation = None
        try:
            yield self._method(arguments) if may_take(arguments, options) else None
        finally:
            defaults.cache_implementation = cache

    def _method(self, arguments: dict[str, Any]) -> Callable[..., Any]:
        streamer = arguments.get("streamer")

        def decode(
            self: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            call = prepared_call(
                input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
            text = None if call is None else decoder._decode(call, streamer)
            if text is not None:
                return text
            # Private, but the loop that generate would have taken by itself.
            return type(self)._sample(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                **model_kwargs,
            )

        decoder = self
        return decode

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that is kept from call to call."""
        return self._buffers.num_bytes

    def warm_up(self, batch: int, length: int) -> bool:
        """Compile and record the steps of calls of this size, with the model's own generation options.

        Returns:
            Whether they are decoded here.
        """
        ids = torch.ones((batch, 2), dtype=torch.int64, device=self._buffers.device)
        padded = ids.clone()
        padded[0, 0] = 0
        self._least_slots = max(LEAST_SLOTS, length)
        devices = [self._buffers.device] if self._buffers.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                for mask in (ids, padded):
                    self._model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=1)
        finally:
            self._least_slots = LEAST_SLOTS
        for state, _ in list(self._recorded.values()):
            while state.bucket.reach < state.bucket.slots:
                optimized = self._model._optimize_model_for_decode()
                with torch.no_grad(), optimized, self._plain(), self._attention():
                    state, _ = self._wider(state)
        return bool(self._recorded)

    def _decode(self, call: Call, streamer: Any) -> Tensor | None:
        """Return the text with its continuation; None if the model cannot be decoded this way."""
        model = self._model
        # The options that decide, in addition to the model, whether a call can be decoded step by step.
        arguments_given = {name: value for name, value in call.arguments.items() if value is not None}
        kinds = {
            name: v.dim() if isinstance(v, Tensor) else type(v).__name__
            for name, v in arguments_given.items()
        }
        kind = tuple(sorted(kinds.items()))
        if kind in self._unfit:
            return None
        refresh_fused(model)
        # Recorded graphs know addresses: record again if a parameter or buffer was moved.
        addresses = tuple(x.data_ptr() for x in (*self._model.parameters(), *self._model.buffers()))
        if addresses != self._addresses:
            self._recorded.clear()
            self._addresses = addresses
        prefilled = DynamicCache(config=model.config.get_text_config(decoder=True))
        arguments = {**call.arguments, call.cache_name: prefilled}
        with self._plain():
            # Private: how transformers' own loops begin, with chunks if the config asks for them.
            outputs = model._prefill(call.ids, call.config, arguments)
            logits = outputs.logits[:, -1].to(torch.float32, copy=True)
            arguments = model._update_model_kwargs_for_generation(outputs, arguments)
        del outputs
        with model._optimize_model_for_decode(), self._plain():
            attends_once = self._attends_once
            state = self._begin(call, arguments, prefilled, logits)
            del prefilled, arguments, logits
            if state is not None:
                with self._attention():
                    return _loop(call, *state, self._wider, streamer)
        if self._attends_once != attends_once:  # with the model's own attention
            return self._decode(call, streamer)
        self._unfit.add(kind)
        return None

    def _begin(
        self, call: Call, arguments: dict[str, Any], prefilled: Cache, logits: Tensor
    ) -> tuple[StepState, Replay] | None:
        """Return the state after the first token, and the step that goes on from there; None if there can be
        none.

        Args:
            logits: the logits of the prefill, float32 ``[rows, V]``.
        """
        inputs = self._inputs_of_step(call, arguments, prefilled)
        if inputs is None:
            return None
        length = max(num_tokens(prefilled), call.ids.shape[1]) + call.most_new
        slots = _rounded(max(length, self._least_slots), LEAST_SLOTS, SLOTS_STEP)
        reach = max(LEAST_REACH, 1 << (length - call.most_new).bit_length())
        config = self._model.config.get_text_config(decoder=True)
        goes_by_position = "attention_mask" in inputs or getattr(config, "attention_chunk_size", None)
        bucket = Bucket(
            _rounded(len(call.ids), 1, ROWS_STEP),
            slots,
            min(slots, reach),
            not goes_by_position and any(window < slots for window in windows(prefilled)),
            tuple(sorted((name, value.dtype) for name, value in inputs.items() if isinstance(value, Tensor))),
            tuple(sorted((name, value) for name, value in inputs.items() if not isinstance(value, Tensor))),
            call.choice,
            call.stop_ids is not None,
        )
        state, replays = self._recorded.get(bucket) or (
            self._make_state(call, bucket, prefilled, logits.shape[1]),
            [],
        )
        _fill(state, call, arguments, prefilled)
        rows = torch.cat([logits, logits[:1].expand(bucket.batch - len(logits), -1)])
        tokens = choose(bucket.choice, rows, state.numbers, state.history())
        state.append(tokens)
        with self._attention():
            for replay in replays:
                if replay.holds():
                    return state, replay
            try:
                got = _logits_of_step(state, self._model, self._forward)[: len(logits)]
            except ShardconvError:
                raise
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                # The ordinary step will do.
                warnings.warn(f"{_ORDINARY}: a step in a fixed cache failed ({error})", stacklevel=2)
                return None
            made = self._record(state)
            if made is None:
                return None
            _fill(state, call, arguments, prefilled)
            state.append(tokens)
            made.begins_calls()
        if not self._is_ordinary(got, call, arguments, tokens[: len(logits)]):
            return None
        self._recorded[bucket] = (state, [*replays, made])
        return state, made

    # Differences between graphs ------------------------------------------------------------------

    def _inputs_of_step(
        self, call: Call, arguments: dict[str, Any], prefilled: Cache
    ) -> dict[str, Any] | None:
        """Return the arguments of the next step except ids and cache; None for unknown changes."""
        if not is_known(prefilled):
            return None
        ids = call.ids if call.ids.shape[1] else call.ids.new_zeros((len(call.ids), 1))
        prepared = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **arguments)
        step_inputs = {
            name: value for name, value in arguments.items() if name in prepared and value is not None
        }
        step_inputs.pop(call.cache_name, None)
        for name, value in step_inputs.items():
            if isinstance(value, Tensor):
                if name not in (COUNTED, *CONSTANT) or value.dim() != 2:
                    return None
            elif not isinstance(value, (bool, int, float, str)):
                return None
        return step_inputs

    def _make_state(self, call: Call, bucket: Bucket, prefilled: Cache, vocabulary: int) -> StepState:
        cache = make_cache(
            prefilled, self._buffers, bucket.batch, bucket.slots, bucket.reach, rings=bucket.rings
        )
        state = make_state(bucket, call.cache_name, cache, self._buffers, vocabulary)
        if self._buffers.generation != self._generation:  # some memory moved, which recorded graphs know
            self._generation = self._buffers.generation
            self._recorded.clear()
        return state

    # Recording -----------------------------------------------------------------------------------

    def _record(self, state: StepState) -> Replay | None:
        """Return the recorded step, which has run, so the state is void; None if it is not one graph."""
        state.rewind()
        devices = [self._buffers.device] if self._records else []
        try:
            with torch.random.fork_rng(devices):
                replay = Replay(self._step, (state, self._model, self._forward), self._records)
        except NOT_ONE_GRAPH as error:  # on all ranks, before anything is computed
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            warnings.warn(f"{_ORDINARY}: a step is not one graph ({first})", stacklevel=2)
            return None
        self.num_recordings += 1
        return replay

    def _wider(self, state: StepState) -> tuple[StepState, Callable[[], None]]:
        """Return the same state with steps of twice the reach, and a function that runs one of them."""
        reach = min(state.bucket.slots, 2 * state.bucket.reach)
        wide, replays = self._recorded.get(replace(state.bucket, reach=reach)) or (state.reaching(reach), [])
        for replay in replays:
            if replay.holds():
                return wide, replay.steps_of_call()
        pause()
        with wide.kept(WARM_UP_RUNS + 1):
            made = self._record(wide)
        if made is None:  # the user was told; the code is right, and takes longer
            return wide, partial(_step, wide, self._model, self._forward)
        made.begins_calls()
        self._recorded[wide.bucket] = (wide, [*replays, made])
        return wide, made.steps_of_call()

    def _is_ordinary(self, got: Tensor, call: Call, arguments: dict[str, Any], tokens: Tensor) -> bool:
        """Return whether logits match an ordinary step, which is run here and changes the prefill's cache."""
        ids = torch.cat([call.ids, tokens[:, None]], dim=1)
        prepared = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **arguments)
        want = self._forward(**prepared, return_dict=True).logits[:, -1].to(torch.float32)
        error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
        if error <= TOLERANCES.get(self._model.dtype, TOLERANCE):
            return True
        if self._attends_once:  # this model's attention may be another one than it seems
            self._attends_once = False
            self._recorded.clear()
            return False
        why = f"one graph for each token gives other logits (by {error:.1e})"
        warnings.warn(f"{_ORDINARY}: {why}", stacklevel=2)
        return False

    def _attention(self) -> AbstractContextManager[None]:
        """Return the attention of steps: in one look at the cache, unless that gave other logits."""
        return attending_once(self._model) if self._attends_once else nullcontext()

    @contextmanager
    def _plain(self) -> Iterator[None]:
        before, self.runs_plain = self.runs_plain, True
        try:
            yield
        finally:
            self.runs_plain = before


_ORDINARY = "this model decodes in the ordinary way, compiled"


def _fill(state: StepState, call: Call, arguments: dict[str, Any], prefilled: Cache) -> None:
    """Set the state to that after the prefill, without a new token."""
    start_call(state, call.ids, arguments, call.numbers, call.pad, call.stop_ids)
    state.cache.fill(prefilled)


def _logits_of_step(state: StepState, model: Any, forward: Forward) -> Tensor:
    """Return the logits of the next token, float32 ``[B, V]``; the cache takes the token."""
    state.cache.begin_call()
    prepared = model.prepare_inputs_for_generation(state.token, next_sequence_length=1, **state.arguments())
    logits: Tensor = forward(**prepared, return_dict=True).logits
    return logits[:, -1].to(torch.float32)


def _step(state: StepState, model: Any, forward: Forward) -> None:
    """Compute the next token from the last one."""
    logits = _logits_of_step(state, model, forward)
    state.advance()
    state.append(choose(state.bucket.choice, logits, state.numbers, state.history()))


def _loop(
    call: Call,
    state: StepState,
    replay: Replay,
    wider: Callable[[StepState], tuple[StepState, Callable[[], None]]],
    streamer: Any,
) -> Tensor:
    """Return the text with its continuation ``[rows, n]``, from a state after the first token."""
    rows = len(call.ids)
    num_cached = int(state.cache.length)
    flag = StopFlag((state.done, state.token))
    num_known, num_issued = 0, 1
    step = replay.steps_of_call()

    def ends(values: tuple[Tensor, ...] | None) -> bool:
        nonlocal num_known
        if values is None:
            return False
        num_known += 1
        progress()
        done, token = values
        if streamer is not None:
            streamer.put(token[:rows, 0].to("cpu", copy=True))
        return state.bucket.stops and bool(done)

    while not (has_ended := ends(flag.after_step())) and num_issued < call.most_new:
        if num_cached + num_issued > state.bucket.reach:  # no slot is left for the token that the step takes
            state, step = wider(state)
        step()
        num_issued += 1
    if not has_ended:
        ends(flag.last())
    if streamer is not None:
        streamer.end()
    return torch.cat([call.ids, state.new_tokens[:rows, :num_known]], dim=1)


def _rounded(number: int, least: int, step: int) -> int:
    if number > step:
        return -(-number // step) * step
    return max(least, 1 << (number - 1).bit_length())
