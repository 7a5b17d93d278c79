"""The small changes that can be made to a source file: which there are, and the file with one of them made. Pure."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
}
_CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
#: What holds no expression of its own, or one that only a type checker reads.
_SKIPPED: Final = (ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Nonlocal, ast.Assert)


@dataclass(frozen=True, slots=True)
class _Place:
    """A statement: the block that holds it, where in it, and the functions and classes around it."""

    block: list[ast.stmt]
    index: int
    around: tuple[ast.stmt, ...]

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]

    @property
    def function(self) -> str:
        return _qualified(self.around) if self.outermost else ""

    @property
    def outermost(self) -> str:
        functions = [index for index, each in enumerate(self.around) if isinstance(each, _FUNCTIONS)]
        return _qualified(self.around[: functions[0] + 1]) if functions else ""


def _qualified(around: tuple[ast.stmt, ...]) -> str:
    return ".".join(each.name for each in around if isinstance(each, (*_FUNCTIONS, ast.ClassDef)))


@dataclass(frozen=True, slots=True)
class Change:
    """One small change. ``before`` and ``after`` are the statement, of a compound one its head."""

    path: str
    function: str  # its qualified name; empty for what runs at import
    before: str
    after: str
    #: The lines of the statement: who runs one of them runs the change.
    lines: range = field(compare=False)
    _tree: ast.Module = field(compare=False, repr=False)
    _place: _Place = field(compare=False, repr=False)
    _statement: ast.stmt = field(compare=False, repr=False)

    @property
    def outermost(self) -> str:
        """The qualified name of the outermost function around it; empty for what runs at import."""
        return self._place.outermost

    def compiled(self, filename: str) -> CodeType:
        """Compile the whole file with the change made."""
        block, index = self._place.block, self._place.index
        original = block[index]
        block[index] = ast.copy_location(self._statement, original)
        try:
            return compile(ast.fix_missing_locations(self._tree), filename, "exec", dont_inherit=True)
        finally:
            block[index] = original

    @property
    def name(self) -> tuple[str, str, str, str]:
        """What stays when lines move: the file, the function, and the statement before and after."""
        return self.path, self.function, self.before, self.after


def sample(path: str, source: str, count: int, seed: int) -> list[Change]:
    """Draw ``count`` changes of a file; the same seed draws the same from the same file."""
    found = all_changes(path, source)
    return random.Random(f"{seed} {path}").sample(found, min(count, len(found)))


def all_changes(path: str, source: str) -> list[Change]:
    """Every change that can be made to a file, in the order of its lines, each name once."""
    tree = ast.parse(source)
    found = {change.name: change for place in _statements(tree, ()) for change in _changes_of(path, tree, place)}
    return list(found.values())


def _statements(node: ast.AST, around: tuple[ast.stmt, ...]) -> Iterator[_Place]:
    for block in _blocks(node):
        for index, statement in enumerate(block):
            yield _Place(block, index, around)
            if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
                continue
            inside = isinstance(statement, (*_FUNCTIONS, ast.ClassDef))
            yield from _statements(statement, (*around, statement) if inside else around)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for each in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        yield from _blocks(each)


def _changes_of(path: str, tree: ast.Module, place: _Place) -> Iterator[Change]:
    original = place.statement
    head = _head(original)
    for statement in _changed(place):
        place.block[place.index] = statement
        after = _head(statement)
        if after != head:
            yield Change(path, place.function, head, after, _lines(original), tree, place, statement)
        place.block[place.index] = original


def _head(statement: ast.stmt) -> str:
    """The statement on one line, without what stands in its blocks."""
    if not list(_blocks(statement)):
        return " ".join(ast.unparse(statement).split())
    bare = copy.copy(statement)
    for name, nothing in (("body", [ast.Pass()]), ("orelse", []), ("finalbody", [])):
        if hasattr(bare, name):
            setattr(bare, name, nothing)
    if isinstance(bare, ast.Match):
        bare.cases = bare.cases[:1]
    return ast.unparse(bare).split("\n", 1)[0]


def _lines(statement: ast.stmt) -> range:
    first_inside = next((block[0].lineno for block in _blocks(statement) if block), None)
    last = statement.end_lineno or statement.lineno
    return range(statement.lineno, last + 1 if first_inside is None else max(first_inside, statement.lineno + 1))


def _changed(place: _Place) -> Iterator[ast.stmt]:
    """The statement in every changed form."""
    statement = place.statement
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef, *_SKIPPED)) or _is_docstring(statement):
        return
    if not place.around:
        return  # a constant: a test that holds its number would only repeat it
    yield from _without(place)
    if isinstance(statement, ast.Return) and statement.value is not None:
        yield from (ast.Return(value) for value in _other_returns(place, statement.value))
    for name in ("value", "test", "iter", "subject", "exc", "target"):
        expression = getattr(statement, name, None)
        if isinstance(expression, ast.expr) and not (name == "target" and isinstance(expression, ast.Name)):
            for other in _expressions(expression, is_condition=name == "test"):
                yield _replaced(statement, name, other)
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _OPERATORS:
        yield ast.AugAssign(statement.target, _OPERATORS[type(statement.op)](), statement.value)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _replaced(statement: ast.stmt, name: str, other: ast.expr) -> ast.stmt:
    changed = copy.copy(statement)
    setattr(changed, name, other)
    return changed


def _without(place: _Place) -> Iterator[ast.stmt]:
    """The statement left out, where that leaves no name without its value."""
    statement = place.statement
    if not place.function:
        return
    sets_attribute = isinstance(statement, ast.Assign | ast.AnnAssign) and not any(
        isinstance(each, ast.Name | ast.Tuple)
        for each in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    )
    acts = isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)
    if acts or sets_attribute or (isinstance(statement, ast.Return) and statement.value is None):
        yield ast.Pass()


def _other_returns(place: _Place, value: ast.expr) -> Iterator[ast.expr]:
    function = next(each for each in reversed(place.around) if isinstance(each, _FUNCTIONS))
    returns = ast.unparse(function.returns) if function.returns else ""
    if returns == "bool":
        yield from (ast.Constant(True), ast.Constant(False))
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield ast.Constant("" if value.value else "changed")
    elif returns.startswith("list["):
        yield ast.List([], ast.Load())
    elif not (isinstance(value, ast.Constant) and value.value is None):
        yield ast.Constant(None)


def _expressions(node: ast.expr, *, is_condition: bool = False) -> Iterator[ast.expr]:
    """An expression in every changed form: itself changed, or one inside it."""
    if is_condition and not isinstance(node, ast.Constant):
        yield from (ast.Constant(True), ast.Constant(False))
    yield from _this(node)
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.JoinedStr | ast.Lambda) and name != "body":
            continue
        if isinstance(value, ast.expr):
            for other in _expressions(value):
                yield _with(node, name, other)
        elif isinstance(value, list):
            yield from _in_list(node, name, value)


def _in_list(node: ast.AST, name: str, values: list[ast.AST]) -> Iterator[ast.expr]:
    for index, each in enumerate(values):
        if isinstance(each, ast.expr):
            others: Iterator[ast.AST] = _expressions(each)
        elif isinstance(each, ast.keyword):
            others = (ast.keyword(each.arg, other) for other in _expressions(each.value))
        elif isinstance(each, ast.comprehension):
            others = _filters(each)
        else:
            continue
        for other in others:
            yield _with(node, name, [*values[:index], other, *values[index + 1 :]])


def _filters(clause: ast.comprehension) -> Iterator[ast.comprehension]:
    for index, each in enumerate(clause.ifs):
        for other in _expressions(each, is_condition=True):
            ifs = [*clause.ifs[:index], other, *clause.ifs[index + 1 :]]
            yield ast.comprehension(clause.target, clause.iter, ifs, clause.is_async)
    for other in _expressions(clause.iter):
        yield ast.comprehension(clause.target, other, clause.ifs, clause.is_async)


def _with(node: ast.AST, name: str, value: object) -> ast.expr:
    changed = copy.copy(node)
    setattr(changed, name, value)
    assert isinstance(changed, ast.expr)
    return changed


def _this(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, ops, comparators):
            for index, operator in enumerate(ops):
                other = _COMPARISONS[type(operator)]()
                yield ast.Compare(left, [*ops[:index], other, *ops[index + 1 :]], comparators)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(operator, rest)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Call(ast.Name(), _, _):
            yield from _other_call(node)
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS and not _is_type(node):
            yield ast.BinOp(left, _OPERATORS[type(operator)](), right)
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(bool() | int() | float() as value):
            yield ast.Constant(_other_number(value))
        case _:
            pass


def _other_call(node: ast.Call) -> Iterator[ast.expr]:
    match node:
        case ast.Call(ast.Name("sorted"), arguments, _):
            yield ast.Call(ast.Name("list", ast.Load()), arguments, [])
        case ast.Call(ast.Name(name), arguments, keywords) if name in _CALLS:
            yield ast.Call(ast.Name(_CALLS[name], ast.Load()), arguments, keywords)
        case _:
            pass


def _other_number(value: float) -> float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 or 1.0


def _is_type(node: ast.BinOp) -> bool:
    """Whether ``|`` joins classes: those of ``isinstance``, which are written with capitals."""
    names = [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in ast.walk(node)]
    return isinstance(node.op, ast.BitOr) and any(name[:1].isupper() or name in {"int", "str"} for name in names)
