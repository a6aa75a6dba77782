"""Tests of the peers' suites that say nothing about a sharded model, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

VARIANTS = "like its variants 08, 16 and 24"
LIMITS = "see [limits](limits.md)"
ROWS_OF_WEIGHTS = (
    "compares the rows of the weight, which are local, with the vocabulary; "
    "`tests/e2e/test_resized_vocabulary.py` compares results"
)
FAILS = "the model cannot be planned: `forward` of the unsharded model fails with its config"

NOT_APPLICABLE: Mapping[str, str] = {
    "test_all_tensors_are_parameter_or_buffer": f"ranks draw other weights than one process; {LIMITS}",
    **{
        f"test_eager_matches_sdpa_inference_{number:02}_": VARIANTS
        for number in range(25)
        if number not in (8, 16, 24)
    },
    "test_bc_torch_dtype": "is about names of arguments of `from_pretrained`",
    "test_torch_save_load": "all ranks write the file that they read",
    "test_from_pretrained_no_checkpoint": f"loads a `state_dict()` as that of a full model; {LIMITS}",
    "test_can_load_ignoring_mismatched_shapes": "compares shapes of parameters, which are local",
    "test_resize_tokens_embeddings": ROWS_OF_WEIGHTS,
    "test_resize_embeddings_untied": ROWS_OF_WEIGHTS,
    "test_generation_tester_mixin_inheritance": "asks for a suite that the source distribution lacks",
}
"""Names of tests that cannot say anything about a sharded model, or what begins several (with ``_`` at the
end) -> why."""


FAIL_BY_THEMSELVES = {
    "clip": ("test_get_image_features_output_1", "test_get_text_features_output_1"),
    "llava": ("test_get_image_features_output_1",),
    "qwen2_vl": ("test_get_image_features_output_1", "test_get_video_features_output_1"),
}
"""Types -> tests that make an unsharded model whose own ``forward`` fails, since its config has
``return_dict=False``, and that call another method of it."""


def why_left_out(model_type: str, test: str) -> str:
    """Return why a test says nothing about a sharded model; nothing if it may."""
    if test in FAIL_BY_THEMSELVES.get(model_type, ()):
        return FAILS
    return next(
        (
            why
            for name, why in NOT_APPLICABLE.items()
            if test == name or (name[-1] == "_" and test.startswith(name))
        ),
        "",
    )


def reasons() -> Iterator[tuple[str, str]]:
    """Yield the tests that are left out, and why."""
    for name, why in NOT_APPLICABLE.items():
        if not name.endswith("_"):
            yield f"`{name}`", why
    yield "the other 22 variants of `test_eager_matches_sdpa_inference`", VARIANTS
    tests: dict[str, list[str]] = {test: [] for names in FAIL_BY_THEMSELVES.values() for test in names}
    for model_type, names in FAIL_BY_THEMSELVES.items():
        for test in names:
            tests[test].append(model_type)
    for test, types in tests.items():
        yield f"`{test}` of {', '.join(types)}", FAILS
