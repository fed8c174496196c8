"""The table of what fits where is what preflight estimates and what was traced, of the models as they are published."""

from tools.memory_table import BEGIN, END, QWEN2_5, README, table
from tools.trace_layouts import SHARES


def test_the_table_in_the_readme_is_what_preflight_estimates_and_near_what_was_traced() -> None:
    _, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    there, _, _ = rest.partition(END)
    heads, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in there.splitlines())
    total, traced = (
        {line[0]: float(line[heads.index(name)].removesuffix(" GB")) for line in lines} for name in ("a rank", "traced")
    )

    assert there == table(traced), "python -m tools.memory_table --write"
    for name in QWEN2_5:
        assert SHARES[0] <= traced[name] / total[name] <= SHARES[1], name


def test_parameters_are_counted_as_the_models_have_them() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("0.5B", "7B"):
        shape = QWEN2_5[name]
        config = AutoConfig.for_model(
            "qwen2", num_hidden_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate, vocab_size=shape.vocab,
            tie_word_embeddings=shape.is_tied,
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert shape.size.num_parameters == sum(one.numel() for one in model.parameters()), name
