"""The weight of a sharded vocabulary: a parameter that refuses to be indexed.

Users read and write rows by the numbers of tokens, and a rank's rows have other numbers.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from ..errors import RefusedCallError


def _refuse_numbers(self: Tensor, *args: object, **kwargs: object) -> NoReturn:
    raise RefusedCallError(
        f"the weight {tuple(self.shape)} of an embedding or a head was indexed, and it has a rank's rows of "
        "the vocabulary, which are not numbered as tokens. embedding(ids) returns rows of tokens; to "
        "write some, call local, elsewhere = embedding.rows(ids) on all ranks, and then write to "
        "embedding.weight.detach()[local[~elsewhere]]"
    )


class _Unnumbered:
    """Operations of tensors that take numbers of rows."""

    __getitem__ = __setitem__ = index_select = select = _refuse_numbers
    index_add_ = index_copy_ = index_fill_ = index_put_ = _refuse_numbers


class VocabularyRows(_Unnumbered, nn.Parameter):
    """A weight with a rank's rows of a vocabulary, which refuses to be indexed; otherwise it is a parameter.

    Its ``data`` is a plain tensor, as compiled code expects of parameters.
    """


# Otherwise optimizers on a GPU would go through all parameters one by one. torch appends DTensor in this way.
_foreach_supported_types.append(VocabularyRows)
