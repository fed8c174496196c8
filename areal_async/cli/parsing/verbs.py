"""Every verb with its sentence, its module and its arguments: what ``--help`` says. Imports nothing heavy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Argument = tuple[str, Mapping[str, Any]]
"""Name and keywords of ``argparse``'s ``add_argument``."""


class Verb(NamedTuple):
    """A word after ``areal_async``; ``areal_async.cli.<module>`` has its ``run(arguments, overrides)``."""

    module: str
    sentence: str
    arguments: tuple[Argument, ...]
    takes_settings: bool = False
    """Whether ``--section.key value`` may follow."""
    goes_on_unheard: bool = False
    """Whether its work counts, and not what it says: it succeeds though stdout cannot be written."""


def _value(name: str, metavar: str, sentence: str, **more: Any) -> Argument:
    """Return an option, or a positional, that takes a value."""
    return name, {"metavar": metavar, "help": sentence, **more}


def _flag(name: str, sentence: str) -> Argument:
    """Return an option that is there or not."""
    return name, {"action": "store_true", "help": sentence}


def _file(sentence: str) -> Argument:
    return _value("file", "FILE.py[:name]", sentence, nargs="?")


def _verb(module: str, sentence: str, *arguments: Argument, **traits: bool) -> Verb:
    return Verb(module, sentence, arguments, **traits)


_HELP_SETTINGS = _flag("--help-settings", "list every setting with its default and unit")
_RUN = _value("--run", "NAME", "name of the run, or its directory", required=True)
_REMOTE = (
    _value("--bus.url", "URL", "the broker of a run elsewhere; its name alone is needed then", dest="url"),
    _value("--bus.credentials", "FILE", "with --bus.url: the operator's key", dest="credentials", type=Path),
    _value("--bus.ca", "FILE", "with --bus.url: who signed the broker's certificate", dest="ca", type=Path),
)
_BY = _value("--by", "WHO", "for the audit record; else the user and the host")
_REASON = _value("--reason", "TEXT", "for the audit record")
_RUN_DIRECTORY = _value("--run-directory", "DIR", "where run left config.yaml and bus/url", required=True)
_TRIAL_CONFIG = _value("--config", "FILE.yaml", "as for run; the settings of gsm8k where there is none")
_WORKS = {"takes_settings": True, "goes_on_unheard": True}
"""What makes something for long, whoever reads what is said of it."""

VERBS = {
    "run": _verb(
        "run",
        "train a model with a workflow; a run of that name goes on with the settings that it recorded",
        _file("workflow, the settings' own when left out; or the name of a run that is to go on"),
        _value("--config", "FILE.yaml", "else configs/<stem>.yaml, or <stem>_cpu.yaml without a GPU"),
        _flag("--fresh", "remove what a run of this name left, and start anew"),
        _flag("--no-display", "plain lines instead of the live display"),
        _HELP_SETTINGS,
        **_WORKS,
    ),
    "init": _verb(
        "projects.init",
        "write a small project that runs at once: workflow, reward, data, model, settings, a test",
        _value("folder", "FOLDER", "where; . for this one, if it is empty", nargs="?"),
        _value("--template", "NAME", "gsm8k, tools, agent, environment or vision (gsm8k)", default="gsm8k"),
    ),
    "try": _verb(
        "try_",
        "run a workflow on a few rows without training, and show every token of it",
        _file("workflow; must be given"),
        _TRIAL_CONFIG,
        _value("--n", "N", "siblings: attempts at each row (1)", type=int, default=1),
        _value("--index", "I", "first row of the data set to take (0)", type=int, default=0),
        _value("--prompts", "K", "so many rows from there (1)", type=int, default=1),
        _value("--row", "JSON", "this row instead of a data set's: '{\"question\": ...}'"),
        _value(
            "--server",
            "URL",
            "an SGLang server that runs already, or our engine; may be given again; left out, one is started",
            action="append",
            default=[],
        ),
        _flag("--tokens", "a table of every token: id, mask, logprob, version"),
        _flag("--json", "one JSON object per trajectory, and nothing else on stdout"),
        _HELP_SETTINGS,
        takes_settings=True,
    ),
    "eval": _verb(
        "evaluate",
        "how right answers to held-out rows are: of a model, or of a run",
        _file("workflow; or else --run"),
        _TRIAL_CONFIG,
        _value("--model", "DIR", "a model folder or hub name; else the settings' model.path"),
        _value("--server", "URL", "as for try", action="append", default=[]),
        _value("--run", "NAME", "a run's model instead; a live run evaluates what its servers hold"),
        _value("--version", "VERSION", "with --run: of a checkpoint: 1-20, a step, best, last, or a tag; else model/"),
        _value("--limit", "N", "only the first so many rows (eval.limit)", type=int),
        _value("--samples", "K", "so many sampled answers a row: avg@k, pass@k (eval.samples)"),
        _flag("--json", "one JSON object per task"),
        _HELP_SETTINGS,
        takes_settings=True,
    ),
    "compare": _verb(
        "compare.verb",
        "two versions, runs, models, servers or settings answer the same held-out rows: how much better the second is",
        _file("workflow whose held-out rows --models or --servers answer; or else --run, or --runs"),
        _TRIAL_CONFIG,
        _value("--run", "NAME", "a run, whose --versions are compared"),
        _value("--versions", "A,B", "of it: 1-20, the step 20, last, best, or a tag; one for both sides, with --b"),
        _value("--runs", "A,B", "two runs: their models, or with --versions A,B these"),
        _value("--models", "A,B", "model folders or hub names; one for both sides, with --b"),
        _value("--servers", "URL,URL", "SGLang servers that run already, or our engine"),
        _value("--b", "SETTING=VALUE", "of the second side alone; may be given again", action="append", default=[]),
        _value("--limit", "N", "only the first so many rows (eval.limit)", type=int),
        _value("--samples", "K", "so many sampled answers a row: avg@k, pass@k (eval.samples)"),
        _value("--at-least", "X", "exit with 1 where the low end of the interval is below", type=float),
        _value("--output", "DIR", "else comparisons/<id> in the run's directory, or in runs"),
        _flag("--anew", "ask also what an evaluation of the run has answers to, of which it keeps no text"),
        _flag("--here", "of a live run: a server that is started here answers, not its nodes (eval.share)"),
        _flag("--json", "the result as one JSON object"),
        _HELP_SETTINGS,
        takes_settings=True,
    ),
    "sft": _verb(
        "tuning",
        "fine-tune a model on prompts and their answers",
        _value("--config", "FILE.yaml", "settings of the fine-tuning"),
        _HELP_SETTINGS,
        **_WORKS,
    ),
    "reward-model": _verb(
        "tuning",
        "train a model that scores answers, on pairs of which one is preferred",
        _value("--config", "FILE.yaml", "settings of the training"),
        _HELP_SETTINGS,
        **_WORKS,
    ),
    "status": _verb(
        "status",
        "one screen about a run: how far it is, what waits where, who is missing",
        _RUN,
        _flag("--json", "everything, as one JSON object"),
        _value("--html", "FILE", "write a report with charts and samples instead, as one file"),
        _flag("--watch", "with --html: write it again after every step"),
        *_REMOTE,
    ),
    "top": _verb("top", "watch a live run, and pause and resume it, on one screen", _RUN, _BY, *_REMOTE),
    "pause": _verb("orders", "admit nothing more to a live run; what was admitted is finished", _RUN, _BY, _REASON),
    "resume": _verb(
        "orders",
        "go on with a paused run, or with other settings",
        _RUN,
        _value(
            "--set",
            "SETTING=VALUE",
            "from now on; may be given again; one that cannot change while the run goes on is refused",
            action="append",
            default=[],
        ),
        _BY,
        _REASON,
    ),
    "servers": _verb(
        "fleet",
        "add inference servers to a live run, or take one away",
        _value(
            "action",
            "add|remove",
            "start more on one node; send one nothing more and end it",
            choices=("add", "remove"),
        ),
        _value("server", "SERVER", "with remove: its id, such as 0-1, as status lists them", nargs="?"),
        _RUN,
        _value("--node", "N", "with add: on this node; else on the one with most GPUs free"),
        _value("--count", "K", "with add: so many (1)", type=int),
        _BY,
        _REASON,
    ),
    "arm": _verb(
        "arm",
        "have a version answer additional prompts of a live run, each beside the newest weights",
        _value("action", "add|list|remove", "an arm, or what arms have come to", choices=("add", "list", "remove")),
        _value("name", "NAME", "of the arm; with add, else made of the version", nargs="?"),
        _RUN,
        _value("--version", "VERSION", "with add: 1-20, its step, last, best or a tag; exported under arms/"),
        _value("--model", "DIR", "with add: a model folder or hub name instead"),
        _value("--share", "S", "with add: so many prompts for each that is admitted (0.1)", type=float, default=None),
        _value("--alpha", "A", "with add: chance of telling apart what is alike (0.05)", type=float),
        _value("--reach", "R", "with add: largest difference of two rewards (1)", type=float),
        _BY,
        _REASON,
    ),
    "hosts": _verb(
        "fleet",
        "have a live run of several hosts generate on one more, or on one less",
        _value("action", "add|remove", "start a node there; have its node end", choices=("add", "remove")),
        _value("host", "HOST", "as launch.hosts names it, or Slurm"),
        _RUN,
        _BY,
        _REASON,
    ),
    "bus": _verb(
        "moving",
        "move a stopped run from its own broker to another one, with all that it has there",
        _value("action", "move", "copy all streams, compare them, and have the run go on there", choices=("move",)),
        _RUN,
        _value("--to", "URL", "of the broker, as bus.url", required=True),
        _value("--credentials", "PATH", "as bus.credentials: a key, or the folder of all roles'", type=Path),
        _value("--ca", "FILE", "as bus.ca: who signed the broker's certificate", type=Path),
        _value("--replicas", "N", "as bus.replicas: copies, where it is a cluster (1)", type=int, default=1),
    ),
    "rollback": _verb(
        "rollback",
        "go on from an earlier checkpoint, as a new lineage; what was trained since is given up",
        _RUN,
        _value("--to", "VERSION", "a checkpoint: 1-20, the step 20, last, best, or a tag", required=True),
        _value("--why", "TEXT", "for the audit record"),
        _BY,
    ),
    "stop": _verb("orders", "end a live run after its step, with a checkpoint to go on from", _RUN, _BY, _REASON),
    "doctor": _verb(
        "doctor",
        "before a run: what it will meet here; of a run: prove or refute its promises from what it has left",
        _file("workflow of a run that is to be started"),
        _value("--config", "FILE.yaml", "settings of a run that is to be started, as for run"),
        _value("--run", "NAME", "name of the run, or its directory"),
        _flag("--json", "everything, as one JSON object"),
        _value("--graph", "FILE.yaml", "check and draw the calls of a step with these settings, as Mermaid"),
        takes_settings=True,
    ),
    "dead": _verb(
        "dead",
        "list the prompts that failed all their attempts, and have them tried again",
        _RUN,
        _flag("--json", "one JSON object per line"),
        _value("--readmit", "GROUP", "try these again; with --all, all that are dead", nargs="*"),
        _flag("--all", "with --readmit: every dead group"),
    ),
    "serve": _verb(
        "serve",
        "answer OpenAI's API with a version of a run, follow it as it moves, record answers and feedback",
        _value("--run", "NAME", "name of the run, or its directory; or else --model"),
        _value("--version", "VERSION", "which version answers: a tag, 1-20, a step, best, last (champion)"),
        _value("--split", "A=0.9,B=0.1", "several versions, each with its share of the traffic"),
        _value("--model", "DIR", "a model folder or hub name, without a run"),
        _value("--config", "FILE.yaml", "with --model: settings; a run has its own"),
        _value("--new-key", "NAME", "make one more key, say it once, and end"),
        _value("--export", "FILE", "write what was recorded, as .jsonl or .parquet, and end", type=Path),
        _value(
            "--form",
            "answers|pairs",
            "with --export: every answer with its feedback, or pairs for reward-model (answers)",
            choices=("answers", "pairs"),
            default="answers",
        ),
        _HELP_SETTINGS,
        **_WORKS,
    ),
    "export": _verb(
        "export",
        "write a checkpoint of a run as a plain Hugging Face folder; or it, or trajectories, for the Hub, with a card",
        _RUN,
        _value("--version", "VERSION", "1-20, a step, best, last, or a tag (last)"),
        _value("--checkpoint", "VERSION", "the same"),
        _value("--output", "DIR", "a plain folder, without a card; else model_<version> in the run's directory"),
        _flag("--trajectories", "for the Hub: a data set of what was trained up to that version, not the model"),
        _value("--to", "DIR", "for the Hub: where the folder with the card is made; else hub/ in the run's directory"),
        _value("--push", "OWNER/NAME", "upload that folder to the Hugging Face Hub; a new repository is private"),
    ),
    "promote": _verb(
        "promote",
        "give a version of a run a tag, if it did not do worse than the one that has it",
        _value("version", "VERSION", "1-20, a step, best, last, or a tag", nargs="?"),
        _RUN,
        _value("--tag", "NAME", "the tag (champion)"),
        _value("--why", "TEXT", "for the run's record"),
        _value("--comparison", "ID", "go by this one; else the newest with the version that has the tag"),
        _value("--at-least", "D", "what the interval's low end must come to (0)", type=float, default=0.0),
        _flag("--force", "whatever a comparison says, or without one"),
        _flag("--remove", "in place of VERSION: no version has the tag any more"),
        _BY,
    ),
    "models": _verb(
        "models",
        "what is kept of all runs: versions, tags, figures, sizes; delete by rule; who did what to a run",
        _value("--folder", "DIR", "the runs in it (runs)"),
        _value("--run", "NAME", "of this run alone"),
        _flag("--audit", "with --run: who started, ordered, changed and tagged what, and why"),
        _value("--delete", "RULE", "say what would go by it: untagged, or abandoned"),
        _value("--keep-newest", "N", "with --delete: the newest of each run stay (1)", type=int, default=1),
        _flag("--yes", "with --delete: do it"),
        _flag("--json", "one JSON object per line"),
    ),
    "trajectories": _verb(
        "trajectories",
        "list what a run has sampled, show one token by token, export it",
        _RUN,
        _value("--step", "N[-M]", "trained in this step, or in these"),
        _value("--workflow", "NAME", "of this workflow"),
        _value("--min-reward", "R", "with at least this reward", type=float),
        _value("--max-reward", "R", "with at most this reward", type=float),
        _value("--min-tokens", "N", "of at least so many tokens, prompts included", type=int),
        _value("--max-tokens", "N", "of at most so many tokens", type=int),
        _value("--version", "V", "sampled by these weights: 1-42, or a step alone"),
        _value("--error", "TEXT", "never trained, for a reason that contains this; '' for any"),
        _flag("--failed", "failed, and why: workflows, rewards, whole groups"),
        _value("--sort", "COLUMN", "largest first; newest when left out", default="newest"),
        _flag("--reverse", "the other way round"),
        _value("--limit", "N", "list so many (50); 0 for all", type=int),
        _value("--show", "ID", "one of the list, GROUP.SIBLING: what was said, token by token"),
        _flag("--tokens", "with --show: a table of every token too"),
        _value("--export", "FILE", "write what is wanted, all of it, as .jsonl, .parquet or .csv"),
        _flag("--json", "one JSON object per line"),
    ),
    "replay": _verb(
        "replay",
        "train again from what a run has archived, without inference",
        _value("--run", "NAME", "name of the recorded run, or its directory; must be given"),
        _value("--steps", "N", "only the first so many (all that are archived)", type=int),
        _HELP_SETTINGS,
        **_WORKS,
    ),
    "controller": _verb("roles", "one process of a run: admits groups and keeps the accounts", _RUN_DIRECTORY),
    "node": _verb(
        "roles",
        "one process of a run: workflows and their inference servers; --join adds this host to a live one",
        _value("--join", "URL", "join the run --run at this broker: nats://HOST:PORT, tls://..."),
        _value("--run", "NAME", "with --join: the run's name"),
        _value("--node-id", "ID", "its own among the run's nodes; with --join, else a new one"),
        _value("--credentials", "FILE", "with --join: the node's key", type=Path),
        _value("--ca", "FILE", "with --join: who signed the broker's certificate", type=Path),
        _flag("--allow-other-files", "with --join: though workflows or rewards are not the run's"),
        _value("--directory", "DIR", "with --join: where this host's runs are (runs)", type=Path),
        _value("--run-directory", "DIR", "without --join: where run left config.yaml and bus/url"),
        **_WORKS,
    ),
    "trainer": _verb("roles", "one process of a run: a rank of the trainer, as torchrun starts it", _RUN_DIRECTORY),
}
