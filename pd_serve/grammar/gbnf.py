"""GBNF, the grammars of llama.cpp, as Lark. Work in proportion to the text, whatever it holds: it is a client's.

The parser is llguidance's. What follows it there (llguidance.gbnf_to_lark.resolve) goes through all rules once for each rule of a chain,
and raises Exception for what clients get wrong, so that it is done here.
Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import ASTNode, GbnfToLarkError, GrammarParser, RuleNode, RuleRefNode

_ROOT = "root"
_START = "start"
_is_lark = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE).search
"""llguidance's own reads all blank lines that follow again at each of them, and lets nobody else run meanwhile."""
_hump = re.compile(r"([a-z])([A-Z])")


def as_lark(text: str) -> str:
    """Lark as it is, GBNF translated, its comments left out. Raises ValueError."""
    if _is_lark(text):
        return text
    try:
        rules = GrammarParser().parse(text)
        for rule in rules.values():
            rule.alternatives = rule.alternatives.simplify()
        _rename(rules, _terminals(_references(rules)))
        return "%llguidance {}\n\n" + "".join([f"{rule.name}: {rule.alternatives.top_str()}\n" for rule in rules.values()])
    except RecursionError:
        raise ValueError("neither Lark nor GBNF: nested too deeply") from None
    except (GbnfToLarkError, IndexError) as error:
        detail = "incomplete escape sequence" if isinstance(error, IndexError) else error
        raise ValueError(f"neither Lark nor GBNF: {detail}") from error


def _references(rules: dict[str, RuleNode]) -> dict[str, set[str]]:
    """The rules that each rule names; every node learns its rule. Raises ValueError."""
    if _ROOT not in rules:
        raise ValueError("neither Lark nor GBNF: no 'root' rule")
    found: dict[str, set[str]] = {}
    for rule in rules.values():
        names = found[rule.name] = set()
        waiting: list[ASTNode] = [rule.alternatives]
        while waiting:
            node = waiting.pop()
            waiting += node.children()
            if not isinstance(node, RuleRefNode):
                continue
            if node.name not in rules:
                raise ValueError(f"rule '{rule.name}' names '{node.name}', and there is no such rule")
            node.target = rules[node.name]
            names.add(node.name)
    return found


def _terminals(references: dict[str, set[str]]) -> set[str]:
    """Rules that name none but such rules, however far down: a lexer can take them whole. Each reference is looked at once."""
    users: dict[str, list[str]] = {name: [] for name in references}
    for name, used in references.items():
        for each in used:
            users[each].append(name)
    num_open = {name: len(used) for name, used in references.items()}
    waiting = [name for name, count in num_open.items() if not count and name != _ROOT]
    terminals: set[str] = set()
    while waiting:
        terminals.add(name := waiting.pop())
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user] and user != _ROOT:
                waiting.append(user)
    return terminals


def _rename(rules: dict[str, RuleNode], terminals: set[str]) -> None:
    """As Lark wants them: terminals in capitals, others in small letters. Raises ValueError where two become one."""
    taken: dict[str, str] = {}
    for name, rule in rules.items():
        plain = _START if name == _ROOT else _hump.sub(r"\1_\2", name.replace("-", "_")).lower()
        rule.name = plain.upper() if name in terminals else plain
        other = taken.setdefault(rule.name, name)
        if other != name:
            raise ValueError(f"the names of the rules '{other}' and '{name}' are too much alike")
