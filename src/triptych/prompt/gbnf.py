"""GBNF grammars to the Lark kind that the grammar library reads. Used by `grammar.py` in the router.

The library first cuts text into terminals, each as long as it can be, and then parses; GBNF knows no such cut. Without
recursion a grammar becomes one terminal. With it, parts without recursion become terminals; where one could swallow
what should follow it, as in `[a-z ]+ " is " expr`, the grammar is parsed character by character: milliseconds a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import groupby, product

from triptych.errors import BadRequestError
from triptych.prompt.gbnf_syntax import (
    Characters,
    CharacterSet,
    Choice,
    Node,
    Parser,
    Reference,
    Repeat,
    Sequence,
    references,
)

# How far the search for terminals that swallow goes. Beyond, they are taken to do so.
_MAX_POSITIONS = 400  # of one terminal
_MAX_PAIRS = 4000  # of its positions
_MAX_ROUNDS = 40  # until what begins and follows each rule is known
_MAX_RULES = 200
MAX_RULES = 500  # of a grammar: the library recurses from rule to rule


def gbnf_to_lark(source: str) -> str:
    """Raises BadRequestError that names the line of what is not GBNF, or a rule that is missing."""
    rules = Parser(source).rules()
    if len(rules) > MAX_RULES:
        raise BadRequestError(f"grammar: {len(rules)} rules, the limit is {MAX_RULES}")
    used = {name: set(references(node)) for name, node in rules.items()}
    for name, names in used.items():
        if missing := sorted(names - rules.keys()):
            raise BadRequestError(f"grammar: rule {name!r} refers to {missing[0]!r}, which is not defined")
    if "root" not in rules:
        raise BadRequestError("grammar: there is no rule 'root' to begin with")
    flat = _without_recursion(used)
    recursive = {name: _joined(node, flat) for name, node in rules.items() if name not in flat}
    if recursive and (len(rules) > _MAX_RULES or _Cuts(rules, recursive, flat).swallow()):
        flat, recursive = set(), rules
    return _lark(rules, recursive, flat)


def _without_recursion(used: dict[str, set[str]]) -> set[str]:
    """Rules that lead neither to themselves nor to one that does."""
    users: dict[str, list[str]] = {name: [] for name in used}
    for name, names in used.items():
        for other in names:
            users[other].append(name)
    num_left = {name: len(names) for name, names in used.items()}
    ready = [name for name, number in num_left.items() if number == 0]
    found = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            num_left[user] -= 1
            if num_left[user] == 0:
                ready.append(user)
    return found


def _is_flat(node: Node, flat: set[str]) -> bool:
    return all(name in flat for name in references(node))


def _joined(node: Node, flat: set[str]) -> Node:
    """The same with neighbours that have no recursion in a sequence of their own, which becomes one terminal."""
    match node:
        case Sequence(parts):
            joined: list[Node] = []
            for is_flat, run in groupby(parts, lambda part: _is_flat(part, flat)):
                neighbours = tuple(run)
                joined += [Sequence(neighbours)] if is_flat else [_joined(part, flat) for part in neighbours]
            return joined[0] if len(joined) == 1 else Sequence(tuple(joined))
        case Choice(options):
            return Choice(tuple(_joined(option, flat) for option in options))
        case Repeat(part, times):
            return Repeat(_joined(part, flat), times)
        case Characters() | Reference():
            return node


# -- writing -----------------------------------------------------------------------------------------------------------


def _lark(rules: dict[str, Node], recursive: dict[str, Node], flat: set[str]) -> str:
    names = {name: f"{'R' if name in flat else 'r'}{k}" for k, name in enumerate(rules)}
    terminals: dict[str, str] = {}  # name by expression

    def rule(node: Node) -> str:
        if flat and _is_flat(node, flat):
            return terminals.setdefault(terminal(node), f"T{len(terminals)}")
        return _write(node, names, rule, lambda sets: " ".join(f"/{one.regex}/" for one in sets))

    def terminal(node: Node) -> str:
        return _write(node, names, terminal, lambda sets: f"/{''.join(one.regex for one in sets)}/")

    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {rule(node)}" for name, node in recursive.items()]
    lines += [f"{names[name]}: {terminal(rules[name])}" for name in sorted(flat, key=list(rules).index)]
    lines += [f"{name}: {expression}" for expression, name in terminals.items()]
    return "\n".join([*lines, ""])


def _write(
    node: Node,
    names: dict[str, str],
    write: Callable[[Node], str],
    match_of: Callable[[tuple[CharacterSet, ...]], str],
) -> str:
    match node:
        case Characters(sets):
            return match_of(sets) if sets else '""'
        case Reference(name):
            return names[name]
        case Sequence(parts):
            return " ".join(f"({write(part)})" if isinstance(part, Choice) else write(part) for part in parts) or '""'
        case Choice(options):
            return " | ".join(map(write, options))
        case Repeat(part, times):
            return f"({write(part)}){times}"


# -- where terminals may be cut ----------------------------------------------------------------------------------------


class _TooLargeError(Exception):
    """The search is given up."""


class _Automaton:
    """Positions of a terminal's characters, which may be first, which last, and which may follow which (Glushkov)."""

    def __init__(self, node: Node, rules: dict[str, Node], mask_of: Callable[[CharacterSet], int]) -> None:
        self.masks: list[int] = []
        self.follow: list[set[int]] = []
        self._rules = rules
        self._mask_of = mask_of
        self._num_nodes = 0
        self.nullable, self.first, self.last = self._add(node)
        self.first_mask = self._union(self.first)

    def _add(self, node: Node) -> tuple[bool, set[int], set[int]]:
        self._num_nodes += 1
        if max(len(self.masks), self._num_nodes) > _MAX_POSITIONS:
            raise _TooLargeError
        match node:
            case Characters(sets):
                start = len(self.masks)
                self.masks += map(self._mask_of, sets)
                self.follow += [{k + 1} for k in range(start, len(self.masks))]
                if not sets:
                    return True, set(), set()
                self.follow[-1] = set()
                return False, {start}, {len(self.masks) - 1}
            case Reference(name):
                return self._add(self._rules[name])
            case Choice(options):
                nullables, firsts, lasts = zip(*map(self._add, options), strict=True)
                return any(nullables), set().union(*firsts), set().union(*lasts)
            case Sequence(parts):
                return self._add_sequence(parts)
            case Repeat(part, _):
                nullable, first, last = self._add(part)
                if node.is_plural:
                    self._connect(last, first)
                return nullable or node.is_optional, first, last

    def _add_sequence(self, nodes: tuple[Node, ...]) -> tuple[bool, set[int], set[int]]:
        nullable, first, last = True, set[int](), set[int]()
        for node in nodes:
            part_nullable, part_first, part_last = self._add(node)
            self._connect(last, part_first)
            if nullable:
                first = first | part_first
            last = part_last | last if part_nullable else part_last
            nullable = nullable and part_nullable
        return nullable, first, last

    def _connect(self, before: set[int], after: set[int]) -> None:
        for position in before:
            self.follow[position] |= after

    def _union(self, positions: set[int]) -> int:
        mask = 0
        for position in positions:
            mask |= self.masks[position]
        return mask

    def extension(self) -> int:
        """Characters that make a longer beginning of a match out of a whole match."""
        mask = self.first_mask if self.nullable else 0
        pending = [pair for pair in product(self.first, self.first) if self.masks[pair[0]] & self.masks[pair[1]]]
        seen = set(pending)
        while pending:
            if len(seen) > _MAX_PAIRS:
                raise _TooLargeError
            one, other = pending.pop()
            if one in self.last:
                mask |= self._union(self.follow[other])
            for pair in product(self.follow[one], self.follow[other]):
                if pair not in seen and self.masks[pair[0]] & self.masks[pair[1]]:
                    seen.add(pair)
                    pending.append(pair)
        return mask


class _Cuts:
    """What may follow each terminal of a recursive grammar. Sets of characters are bits, one for each piece between
    the ends of all ranges."""

    def __init__(self, rules: dict[str, Node], recursive: dict[str, Node], flat: set[str]) -> None:
        self._rules = rules
        self._recursive = recursive
        self._flat = flat
        sets = [one for node in rules.values() for one in _sets(node)]
        self._ends = sorted({end for one in sets for low, high in one.ranges for end in (low, high + 1)} | {0})
        self._automata: dict[int, _Automaton | None] = {}  # by id of the node; None where it is no terminal
        self._first = dict.fromkeys(recursive, 0)
        self._nullable = dict.fromkeys(recursive, False)
        self._after: dict[int | str, int] = {}  # what may follow a terminal, by id of its node, or a rule, by name

    def swallow(self) -> bool:
        """Whether a terminal that is as long as it can be may take the beginning of what has to follow it."""
        try:
            self._find_beginnings()
            self._find_followers()
            terminals = [(self._automata[key], mask) for key, mask in self._after.items() if isinstance(key, int)]
            return any(automaton.extension() & mask for automaton, mask in terminals if automaton is not None)
        except _TooLargeError:
            return True

    def _find_beginnings(self) -> None:
        for _ in range(_MAX_ROUNDS):
            before = dict(self._first), dict(self._nullable)
            for name, node in self._recursive.items():
                self._nullable[name], self._first[name] = self._begin(node)
            if before == (self._first, self._nullable):
                return
        raise _TooLargeError

    def _find_followers(self) -> None:
        for _ in range(_MAX_ROUNDS):
            before = dict(self._after)
            for name, node in self._recursive.items():
                self._add_after(node, self._after.get(name, 0))
            if before == self._after:
                return
        raise _TooLargeError

    def _automaton(self, node: Node) -> _Automaton | None:
        """Of a part without recursion."""
        if id(node) not in self._automata:
            is_terminal = _is_flat(node, self._flat)
            self._automata[id(node)] = _Automaton(node, self._rules, self._mask) if is_terminal else None
        return self._automata[id(node)]

    def _mask(self, characters: CharacterSet) -> int:
        mask = 0
        for low, high in characters.ranges:
            mask |= (1 << bisect_left(self._ends, high + 1)) - (1 << bisect_left(self._ends, low))
        return ~mask & ((1 << len(self._ends)) - 1) if characters.negated else mask

    def _begin(self, node: Node) -> tuple[bool, int]:
        """Whether it may be empty, and the characters that it may begin with."""
        if automaton := self._automaton(node):
            return automaton.nullable, automaton.first_mask
        match node:
            case Reference(name):
                return self._nullable[name], self._first[name]
            case Choice(options):
                parts = [self._begin(option) for option in options]
                mask = 0
                for _, first in parts:
                    mask |= first
                return any(empty for empty, _ in parts), mask
            case Sequence(nodes):
                empty, mask = True, 0
                for part in nodes:
                    part_empty, first = self._begin(part)
                    mask |= first if empty else 0
                    empty = empty and part_empty
                return empty, mask
            case Repeat(part, _):
                empty, mask = self._begin(part)
                return empty or node.is_optional, mask
            case Characters():
                raise AssertionError("characters have no recursion")

    def _add_after(self, node: Node, after: int) -> None:
        if self._automaton(node):
            self._after[id(node)] = self._after.get(id(node), 0) | after
            return
        match node:
            case Reference(name):
                self._after[name] = self._after.get(name, 0) | after
            case Choice(options):
                for option in options:
                    self._add_after(option, after)
            case Sequence(nodes):
                for part in reversed(nodes):
                    self._add_after(part, after)
                    empty, first = self._begin(part)
                    after = first | after if empty else first
            case Repeat(part, _):
                self._add_after(part, after | (self._begin(part)[1] if node.is_plural else 0))
            case Characters():
                raise AssertionError("characters have no recursion")


def _sets(node: Node) -> list[CharacterSet]:
    match node:
        case Characters(sets):
            return list(sets)
        case Sequence(nodes) | Choice(nodes):
            return [one for part in nodes for one in _sets(part)]
        case Repeat(part, _):
            return _sets(part)
        case Reference():
            return []
