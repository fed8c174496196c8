"""The one door: ``python -m areal_async VERB``, or ``areal-async VERB``.

Nothing heavy is imported before the command line is understood. What ends a verb is told once: a user's
mistake or a failed run as one sentence on stderr (status 2 or 1, the traceback in the log file), a bug of
ours as its traceback.
"""

import argparse
import difflib
import importlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NoReturn

from areal_async.cli.parsing.verbs import VERBS, Verb
from areal_async.errors import PipelineError, UserError, leaves_of
from areal_async.process.gc_pauses import importing
from areal_async.process.host import take_gpus
from areal_async.process.plain_text import escaped
from areal_async.process.stdio import loss, program, say

INTERRUPTED = 130
"""Exit status of a command that the user broke off."""
UNREAD = 141
"""Whoever read it has gone: as of a program that SIGPIPE ends."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str]) -> int:
    """Run one verb and return the exit status."""
    try:
        take_gpus()
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BaseExceptionGroup, PipelineError, OSError, SystemExit) as raised:
        if (lost := _loss_in(raised)) is not None:
            return _status_unheard(lost)
        error = expected_error(raised)
        if error is None:
            raise
        return _tell(error, raised)


def _loss_in(raised: BaseException) -> OSError | None:
    """Return why stdout could not be written, where nothing else was raised; rich exits when its reader has gone."""
    causes = [leaf.__context__ if isinstance(leaf, SystemExit) else leaf for leaf in leaves_of(raised)]
    errors = [cause for cause in causes if isinstance(cause, OSError)]
    if len(errors) < len(causes):
        return None
    return loss() or next((error for error in errors if isinstance(error, BrokenPipeError)), None)


def _status_unheard(lost: OSError) -> int:
    return UNREAD if isinstance(lost, BrokenPipeError) else UserError.exit_code


def expected_error(raised: BaseException) -> PipelineError | None:
    """Return the error that explains a group of nothing but errors raised on purpose, a user's mistake first."""
    leaves = leaves_of(raised)
    errors = [leaf for leaf in leaves if isinstance(leaf, PipelineError)]
    if len(errors) < len(leaves):
        return None
    return next((error for error in errors if isinstance(error, UserError)), errors[0])


def _tell(error: PipelineError, whole: BaseException) -> int:
    """Say what went wrong in one line, and keep the traceback in the log file when there is one."""
    if "areal_async.telemetry.log" in sys.modules:
        importlib.import_module("areal_async.telemetry.log").record_failure(whole)
    with suppress(OSError):  # its terminal has gone, or its disk is full
        sys.stderr.write(escaped(" ".join(str(error).split())) + "\n")
    return error.exit_code if isinstance(error, UserError) else 1


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        _top_parser().print_help()
        return _if_heard(0 if arguments else UserError.exit_code)
    name, *rest = arguments
    if name == "--version":
        sys.stdout.write(f"areal_async {importlib.import_module('areal_async').__version__}\n")
        return _if_heard(0)
    verb = VERBS.get(name)
    if verb is None:
        near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}" if near else f"need one of {', '.join(VERBS)}"
        raise UserError(f"unknown verb {name}; {remedy}")
    parser = _Parser(prog=f"{program()} {name}", description=verb.sentence, allow_abbrev=False)
    for argument, keywords in verb.arguments:
        parser.add_argument(argument, **keywords)
    if verb.takes_settings:
        parser.epilog = "Any setting may follow as --section.key value; --help-settings lists them."
    own, overrides = split_overrides(rest, verb)
    parsed = parser.parse_args(own)
    parsed.verb = name
    if getattr(parsed, "help_settings", False):
        return _if_heard(_list_settings(name))
    with importing():
        module = importlib.import_module(f"areal_async.cli.{verb.module}")
    status: int = module.run(parsed, overrides)
    return status if verb.goes_on_unheard else _if_heard(status)


def _list_settings(verb: str) -> int:
    kinds = importlib.import_module("areal_async.cli.tuning").KINDS
    settings = kinds[verb][0] if verb in kinds else importlib.import_module("areal_async.config.settings").Settings
    say(importlib.import_module("areal_async.monitor.text").settings_help(settings))
    return 0


def _if_heard(status: int) -> int:
    """Return the status of what answers: another one where the answer could not be written."""
    lost = loss()
    return status if lost is None else _status_unheard(lost)


def _top_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program(),
        usage=f"{program()} VERB [-h] ...",
        description="Asynchronous reinforcement learning for language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs:\n" + "\n".join(f"  {name:<14}{verb.sentence}" for name, verb in VERBS.items()),
    )
    parser.add_argument("--version", action="store_true", help="say which version this is")
    return parser


def split_overrides(words: Sequence[str], verb: Verb) -> tuple[list[str], list[str]]:
    """Part the verb's own words from ``--section.key value``, whose value must not pass for a positional.

    Raises:
        UserError: a word that is no option of the verb and no setting either.
    """
    options = {"--help"} | {name for name, _ in verb.arguments if name.startswith("--")}
    with_value = {name for name, keywords in verb.arguments if name in options and "action" not in keywords}
    own: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        is_override = name.startswith("--") and name not in options
        if is_override:
            _refuse_misspelt(name, options, verb)
        part = overrides if is_override else own
        part.append(word)
        if not equals and (is_override or name in with_value):
            part += itertools.islice(rest, 1)
    return own, overrides


def _refuse_misspelt(name: str, options: Iterable[str], verb: Verb) -> None:
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
    if near or not verb.takes_settings:
        remedy = f"did you mean {near[0]}" if near else f"need one of {', '.join(sorted(options))}"
        raise UserError(f"unknown option {name}; {remedy}")
