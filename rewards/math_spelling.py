r"""Write an answer in the one spelling that the comparisons read: typography, blanks, LaTeX's many names for one thing.

Nothing that tells answers apart is dropped: row separators, signs, decimal points, units and the names of variables
stay. Words (``\text{cm}``) come out between double quotes, or they would be read as products of variables.

Invariants: no text makes anything here raise; the time taken grows no faster than the text.
"""

import re
from typing import Final

_CHARACTERS: Final = str.maketrans(
    dict.fromkeys("−–‐‑‒﹣", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\t\r\n~", " ")
    | {'"': "", "“": "", "”": "", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
    | {"×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "√": r"\sqrt ", "±": r"\pm ", "∞": r"\infty "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset "}
    | {"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "°": r"^\circ "}
    | {"ℝ": r"\mathbb{R}", "⟨": r"\langle ", "⟩": r"\rangle "}
)
_COMMANDS: Final = (
    dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac")
    | dict.fromkeys(("leq", "leqslant"), r"\le ")
    | dict.fromkeys(("geq", "geqslant"), r"\ge ")
    | dict.fromkeys(("left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg", "middle"), "")
    | dict.fromkeys(("displaystyle", "textstyle", "limits", "therefore", "!"), "")
    | dict.fromkeys(("quad", "qquad", "thinspace", ",", ";", ":", " "), " ")
    | dict.fromkeys(("lvert", "rvert", "vert"), "|")
    | {
        "neq": r"\ne ",
        "lt": "<",
        "gt": ">",
        "ast": r"\cdot ",
        "div": "/",
        "degree": r"^\circ ",
        "varnothing": r"\emptyset ",
    }
    | {"lbrace": r"\{", "rbrace": r"\}", "$": "$", "%": "%", "infinity": r"\infty ", "inf": r"\infty "}
)
_DOUBLED: Final = re.compile(
    r"\\\\(?=(?:[dt]?frac|sqrt|pi|text|cdot|times|left|right|infty|[lg]eq?|neq?|in|cup)(?![a-z]))"
)
_COMMAND: Final = re.compile(r"\\(?:([A-Za-z]+) ?|([^A-Za-z]))")
_DELIMITER: Final = re.compile(r"(?<!\\)(?:\\[()\[\]]|\${1,2})")
_WORDS: Final = re.compile(
    r"\\(?:text|textbf|textrm|textit|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s?\{([^{}]*)\}"
)
_REALS: Final = re.compile(r'\\mathbb\s?\{?\s?R\s?\}?|"all real numbers"|^all real numbers$')
_FUNCTION: Final = re.compile(r"(?<![A-Za-z\\\"])(sqrt|pi|sin|cos|tan|log|ln|infinity|inf|theta)(?![A-Za-z\"])")
_BOLD: Final = re.compile(r"(?<![0-9A-Za-z)}])(?:\*\*|__|`)|(?:\*\*|__|`)(?![0-9A-Za-z({\\-])")
_POWER: Final = re.compile(r"([_^]) ?(?:(-?[0-9]+|[A-Za-z])|\(([^()]*)\))")
_ROOT: Final = re.compile(r"\\sqrt ?(?:([0-9]+|[A-Za-z])|\(([^()]*)\))")
_ONE: Final = r" ?(?:\{([^{}]*)\}|([0-9A-Za-z])|(\\[a-z]+))"
_FRACTION: Final = re.compile(rf"\\frac{_ONE}{_ONE}")
_NEEDLESS_BLANK: Final = re.compile(r" ?([-+*/^_=<>{}()\[\]|&]|\\\\|\\[{}]) ?|(\\[A-Za-z]+) (?![A-Za-z])| (?=\\)")


def plainly_spelled(text: str) -> str:
    """Return an answer in the one spelling that the comparisons read."""
    text = _BOLD.sub("", _DOUBLED.sub(r"\\", re.sub(r",\s?\\!\s?", ",", text)))
    for ascii_sign, sign in (("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne ")):
        text = text.replace(ascii_sign, sign)
    is_currency = len(re.findall(r"(?<!\\)\$", text)) % 2 == 1  # else every dollar sign opens or closes a formula
    text = _DELIMITER.sub(lambda sign: "$" if is_currency and "$" in sign[0] else " ", text).replace("{,}", "")
    text = _WORDS.sub(r' "\1" ', text.translate(_CHARACTERS))
    text = _COMMAND.sub(_command, _FUNCTION.sub(r"\\\1 ", text))
    text = _REALS.sub(r"(-\\infty,\\infty)", " ".join(text.split()).replace("**", "^"))
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    text = _POWER.sub(lambda power: f"{power[1]}{{{power[2] or power[3]}}}", text)
    text = _FRACTION.sub(
        lambda one: r"\frac" + "".join(f"{{{part}}}" for part in one.groups() if part is not None), text
    )
    text = _NEEDLESS_BLANK.sub(lambda blank: blank[1] or blank[2] or "", text).replace(r"^{\circ}", r"^\circ")
    text = re.sub(r' ?" *([^"]*?) *" ?', r'"\1"', text).lstrip(" ,;:").rstrip(" .,;:")
    return re.sub(r'"(-?[0-9][0-9.,/]*|[ei])"|^\{([^{}]*)\}$', r"\1\2", text)


def _command(command: re.Match[str]) -> str:
    name = command[1] or command[2]
    return _COMMANDS.get(name, f"\\{name} " if command[1] else command[0])
