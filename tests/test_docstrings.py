"""Docstrings of the public names: shapes, what comes back, what is raised, where it comes from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import cute_sparse_mla
from cute_sparse_mla import api, compat, errors, groups, indices, parallel

MODULES = (api, indices, compat, parallel)
WITH_CALLS = (api, groups, compat, parallel)  # the others say once for all what they raise


def _public() -> list[Any]:
    """The package's names, and what its public modules define."""
    named = [getattr(cute_sparse_mla, name) for name in cute_sparse_mla.__all__]
    defined = [value for module in MODULES for name, value in vars(module).items() if not name.startswith("_")
               and getattr(value, "__module__", "") == module.__name__]  # fmt: skip
    values = [value for value in [*named, *defined] if inspect.isfunction(value) or inspect.isclass(value)]
    return list(dict.fromkeys(values))


def _name(value: Any) -> str:
    return f"{value.__module__.rpartition('.')[2]}.{value.__name__}"


PUBLIC = _public()
FUNCTIONS = [value for value in PUBLIC if inspect.isfunction(value)]
CALLS = [value for value in FUNCTIONS if value.__module__ in [module.__name__ for module in WITH_CALLS]]


def _text(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _takes_tensors(function: Callable[..., Any]) -> bool:
    return any("Tensor" in str(p.annotation) for p in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("value", PUBLIC, ids=_name)
def test_every_public_name_says_what_it_is(value: Any) -> None:
    text = _text(value)
    assert len(text) > 20 and (text[0].isupper() or text[0] == "`"), text
    inherited = [base.__doc__ for base in getattr(value, "__mro__", ())[1:]]
    assert value.__doc__ and value.__doc__ not in inherited


@pytest.mark.parametrize("function", FUNCTIONS, ids=_name)
def test_functions_explain_their_arguments(function: Callable[..., Any]) -> None:
    """Each argument by name, or a reference to the call that explains it; shapes wherever there are tensors."""
    text = _text(function)
    elsewhere = re.search(r"(as in|as|those of) `[\w.]+`|see the module's table", text)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", text) or elsewhere, f"{function.__name__} does not mention {name}"
    if _takes_tensors(function):
        assert re.search(r"\[[\w., /+*-]+\]", text) or elsewhere, "no shape"


@pytest.mark.parametrize("function", CALLS, ids=_name)
def test_calls_say_what_they_return_and_raise(function: Callable[..., Any]) -> None:
    text = _text(function)
    assert "Raises" in text or re.search(r"(as in|as) `(api\.)?\w+`", text), "no word about errors"
    assert re.search(r"Returns|: `\(?\w+", text) or "`" in text.splitlines()[0], "no word about results"


def test_the_contract_stands_in_one_place() -> None:
    text = api.__doc__ or ""
    table = ("q", "kv", "indices", "topk_length", "q_positions", "attn_sink", "out", "lse")
    assert all(re.search(rf"^    {name} +\[", text, flags=re.M) for name in table)
    assert all(word in text for word in ("[B, S, H, D]", "[T, H, D]", "fp32", "natural log", "int64", "units of"))
    assert "Source" in _text(api.fwd), "where the operator comes from"


@pytest.mark.parametrize("module", [*MODULES, groups, errors], ids=lambda m: m.__name__)
def test_modules_have_docstrings(module: ModuleType) -> None:
    assert len((module.__doc__ or "").strip()) > 40


def test_the_index_builders_say_what_they_raise() -> None:
    assert "raise" in (indices.__doc__ or "")


def test_a_missing_docstring_is_noticed() -> None:
    def nameless(q: Tensor) -> Tensor:
        """Does something."""
        return q

    with pytest.raises(AssertionError, match="does not mention q"):
        test_functions_explain_their_arguments(nameless)
