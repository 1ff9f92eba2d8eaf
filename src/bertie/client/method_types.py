"""The descriptors that turn methods which return a `Call` into methods that send it, and their types.

A method is written once and bound to both clients: in a `Client` it returns the result, in an `AsyncClient` a
coroutine. A single text has a single result.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import wraps
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from bertie.arguments import explain_arguments
from bertie.client.requests import Call
from bertie.client.responses import Vectors

if TYPE_CHECKING:
    from bertie.client.clients import AsyncClient, Client
    from bertie.tasks.results import AnswerResult, RankedDocument

P = ParamSpec("P")
R = TypeVar("R")
Bound = TypeVar("Bound")  # the type of a method of `Client`
AsyncBound = TypeVar("AsyncBound")
Awaited: TypeAlias = Coroutine[Any, Any, R]
Documents: TypeAlias = str | Sequence[str]


class Descriptor(Generic[Bound, AsyncBound]):
    """A method of both clients."""

    def __init__(self, build: Callable[..., Call[Any, Any]]) -> None:
        self._build = explain_arguments(build)

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Client, kind: type) -> Bound: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type) -> AsyncBound: ...
    def __get__(self, client: Client | AsyncClient | None, kind: Any) -> Any:
        """Bind the method, as functions in a class are bound."""
        method = kind._method(self._build)
        return method if client is None else method.__get__(client)


class ClientMethod(Descriptor[Callable[P, R], Callable[P, Awaited[R]]]):
    """A method with one kind of result."""

    def __init__(self, build: Callable[Concatenate[Any, P], Call[Any, R]]) -> None:
        super().__init__(build)


class ReadTexts(Protocol[P, R]):
    """A method that returns a result for a text, and a list of them for several."""

    @overload
    def __call__(self, texts: str, *args: P.args, **options: P.kwargs) -> R: ...
    @overload
    def __call__(self, texts: Iterable[Any], *args: P.args, **options: P.kwargs) -> list[R]: ...


class ReadTextsAsync(Protocol[P, R]):
    """The same, to await."""

    @overload
    def __call__(self, texts: str, *args: P.args, **options: P.kwargs) -> Awaited[R]: ...
    @overload
    def __call__(self, texts: Iterable[Any], *args: P.args, **options: P.kwargs) -> Awaited[list[R]]: ...


class TextsMethod(Descriptor[ReadTexts[P, R], ReadTextsAsync[P, R]]):
    """A method whose first argument is a text or several."""

    def __init__(self, build: Callable[Concatenate[Any, Iterable[Any], P], Call[Any, list[R]]]) -> None:
        super().__init__(accept_single(build))


def accept_single(build: Callable[..., Call[Any, Any]]) -> Callable[..., Call[Any, Any]]:
    """A method that also takes a single text, whose result it returns."""

    @wraps(build)
    def wrapped(self: Any, texts: Any, *args: Any, **options: Any) -> Call[Any, Any]:
        if not isinstance(texts, str):
            return build(self, texts, *args, **options)
        return first_of(build(self, [texts], *args, **options))

    return wrapped


def first_of(call: Call[Any, Any]) -> Call[Any, Any]:
    """A call with the first of its results as its result."""
    return Call(call.requests, lambda results: itemgetter(0)(call.combine(results)))


# --- methods with two arguments, of which each may be one text or several ---


class Compare(Protocol):
    """(N, M) similarities; a single text has no axis."""

    @overload
    def __call__(self, a: str, b: str) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, a: str | Iterable[str], b: str | Iterable[str] | None = None) -> Vectors: ...


class CompareAsync(Protocol):
    """The same, to await."""

    @overload
    def __call__(self, a: str, b: str) -> Awaited[float]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, a: str | Iterable[str], b: str | Iterable[str] | None = None) -> Awaited[Vectors]: ...


class Answer(Protocol[P]):
    """A question and its documents, or a list of such pairs."""

    @overload
    def __call__(self, questions: str, documents: Documents, *args: P.args, **options: P.kwargs) -> AnswerResult: ...
    @overload
    def __call__(
        self, questions: Iterable[tuple[str, Documents]], documents: None = None, *args: P.args, **options: P.kwargs
    ) -> list[AnswerResult]: ...


class AnswerAsync(Protocol[P]):
    """The same, to await."""

    @overload
    def __call__(
        self, questions: str, documents: Documents, *args: P.args, **options: P.kwargs
    ) -> Awaited[AnswerResult]: ...
    @overload
    def __call__(
        self, questions: Iterable[tuple[str, Documents]], documents: None = None, *args: P.args, **options: P.kwargs
    ) -> Awaited[list[AnswerResult]]: ...


class Rerank(Protocol[P]):
    """A query with one document, or with several."""

    @overload
    def __call__(self, query: str, documents: str, *args: P.args, **options: P.kwargs) -> RankedDocument: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, query: str, documents: Iterable[str], *args: P.args, **options: P.kwargs
    ) -> list[RankedDocument]: ...


class RerankAsync(Protocol[P]):
    """The same, to await."""

    @overload
    def __call__(self, query: str, documents: str, *args: P.args, **options: P.kwargs) -> Awaited[RankedDocument]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, query: str, documents: Iterable[str], *args: P.args, **options: P.kwargs
    ) -> Awaited[list[RankedDocument]]: ...


class AnswerMethod(Descriptor[Answer[P], AnswerAsync[P]]):
    """`answer`."""

    def __init__(self, build: Callable[Concatenate[Any, Any, Any, P], Call[Any, Any]]) -> None:
        super().__init__(build)


class RerankMethod(Descriptor[Rerank[P], RerankAsync[P]]):
    """`rerank`."""

    def __init__(self, build: Callable[Concatenate[Any, Any, Any, P], Call[Any, Any]]) -> None:
        super().__init__(build)


class SimilarityMethod(Descriptor[Compare, CompareAsync]):
    """`similarity`."""
