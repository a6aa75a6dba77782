"""Generate text: ``torchrun --nproc-per-node 2 -m shardconv_runtime.generate OUT "Once upon a time"``.

``shardconv run`` starts it on one machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from .comm.launchers import end_with_launcher, run_program
from .errors import MissingFileError, OptionError

_log = logging.getLogger("shardconv_runtime.generate")  # the module is run as __main__

MAX_NEW_TOKENS = 256
"""Default for the tokens of an answer."""


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How prompts are continued."""

    max_new_tokens: int
    system: str | None
    """The first message of a chat; None: there is none."""
    is_chat: bool
    """Whether a prompt becomes a message to a tokenizer that has a chat template."""
    sampling: dict[str, Any]
    """Settings of ``generate``, in place of the settings of the model."""


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the command of shardconv has the same options."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node TP -m shardconv_runtime.generate",
        description="Continues a prompt with a converted model, and prints the text as it comes.",
    )
    parser.add_argument("source", metavar="SRC", help="directory that `shardconv convert` wrote, or a model")
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="text to continue; default: the lines of the input, one by one",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=MAX_NEW_TOKENS,
        metavar="N",
        help="maximum tokens of an answer; default: %(default)s",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the most likely token; default: the model's"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="default: the model's")
    parser.add_argument("--top-k", type=int, metavar="K", help="default: the model's")
    parser.add_argument("--repetition-penalty", type=float, metavar="X", help="default: the model's")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of sampling; default: another each time")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the prompt")
    parser.add_argument("--no-chat", action="store_true", help="continue the text; use no chat template")
    parser.add_argument("--compile", action="store_true", help="compile: a slow start, then faster tokens")
    parser.add_argument("--quiet", "-q", action="store_true", help="print only the answer, and errors")
    return parser


def settings_of(arguments: argparse.Namespace) -> PromptSettings:
    """Return the settings of the command line, checked.

    Raises:
        OptionError: a number is out of range.
    """
    checks = (
        ("max-new-tokens", arguments.max_new_tokens, 1, "1 or more"),
        ("temperature", arguments.temperature, 0, "0 or more"),
        ("top-k", arguments.top_k, 1, "1 or more"),
    )
    for name, value, least, expected in checks:
        if value is not None and value < least:
            raise OptionError(f"--{name} must be {expected}, got {value}")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise OptionError(f"--top-p must be above 0 and at most 1, got {arguments.top_p}")
    sampling: dict[str, Any] = {}
    if arguments.temperature == 0:
        # transformers warns about settings that greedy decoding ignores.
        sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    else:
        names = ("temperature", "top_p", "top_k")
        sampling = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        if sampling:
            sampling["do_sample"] = True
    if arguments.repetition_penalty is not None:
        sampling["repetition_penalty"] = arguments.repetition_penalty
    return PromptSettings(arguments.max_new_tokens, arguments.system, not arguments.no_chat, sampling)


def run_rank(arguments: argparse.Namespace) -> None:
    """Load this rank's part of the model, and generate together with the others."""
    settings = settings_of(arguments)
    _log.info("loading %s", arguments.source)

    # After the arguments are checked: these take seconds.
    import torch.distributed as dist
    from transformers import AutoTokenizer, set_seed

    from .comm.rank_0 import from_rank_0
    from .loaded import loaded
    from .loading.load import load

    model = load(arguments.source, compile=arguments.compile)
    directory = loaded(model).directory
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise MissingFileError(
            f"{directory}: the tokenizer cannot be loaded: {error}; copy the files of the tokenizer there"
        ) from error
    # All ranks draw from one random state, which that of rank 0 replaces.
    set_seed(int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed)
    _log.info("generating")
    if arguments.prompt is not None:
        answer(model, tokenizer, arguments.prompt, settings)
    else:
        # Only rank 0 has the terminal; the others wait for the line, or for None at the end.
        while (line := from_rank_0(read_line)) is not None:
            if line.strip():
                answer(model, tokenizer, line, settings)
    if dist.is_initialized():
        dist.barrier()  # a rank that is ahead would close connections on which others still wait
        dist.destroy_process_group()


def answer(model: Any, tokenizer: Any, prompt: str, settings: PromptSettings) -> None:
    """Print the continuation; every rank calls this with the same prompt, and rank 0 prints."""
    from transformers import TextStreamer  # it takes seconds to import, see ``run_rank``

    inputs = encoded(tokenizer, prompt, settings).to(model.device)
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, **settings.sampling}
    if tokenizer.pad_token_id is not None:
        options["pad_token_id"] = tokenizer.pad_token_id
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, **options, streamer=streamer)


def encoded(tokenizer: Any, prompt: str, settings: PromptSettings) -> Any:
    """Return token ids and mask ``[1, S]`` of a prompt, which is a message to a chat model."""
    if settings.is_chat and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        if settings.system is not None:
            messages.insert(0, {"role": "system", "content": settings.system})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    elif settings.system is not None:
        raise OptionError("--system needs a chat template, which the tokenizer lacks or --no-chat leaves out")
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    return inputs


def read_line() -> str | None:
    """Return a line from the terminal; None at its end (Control-D)."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def main() -> int:
    """Generate; return the exit code."""
    arguments = argument_parser().parse_args()
    end_with_launcher()
    return run_program(partial(run_rank, arguments), quiet=arguments.quiet)


if __name__ == "__main__":
    sys.exit(main())
