"""LoRA adapters: logits and texts equal PEFT on transformers' classes, and are independent of the batch."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import in_rope_order, write_gguf, written
from lora_files import random_adapter, write_adapter
from oracles import assert_greedy_text, logits_of_oracle, oracle_of
from peft import LoraConfig, PeftModel, get_peft_model
from support import new_folder, tiny_model

from headstart.api.llm import LLM
from headstart.core import SamplingParams
from headstart.errors import ModelError, UsageError
from headstart.formats import safetensors_file
from headstart.tools.inspect.run import InspectOptions, run as inspect

pytestmark = [  # warnings of PEFT about itself, names of experts without a target, and tied LM heads
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*did not match any targeted module:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning"),
]
NAMES_OF_PARTS = {
    **{part: f"attn_{part}" for part in "qkv"}, "o": "attn_output",
    **{part: f"ffn_{part}" for part in ("gate", "up", "down")},
}  # fmt: skip
"""Part of a projection's name -> llama.cpp's name."""
LINEAR = "all-linear"
FAMILIES: Mapping[str, Seq[str] | str] = {
    **dict.fromkeys(("llama", "qwen3", "gemma3", "phi3", "glm4", "olmo2", "granite", "cohere2", "seed_oss"), LINEAR),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen2_moe": ("q_proj", "v_proj", "o_proj", "shared_expert.gate_proj", "shared_expert.down_proj"),
    "qwen3_5": ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "down_proj"),
    "lfm2": ("q_proj", "out_proj", "in_proj", "w1", "w2"),
    "falcon_h1": ("q_proj", "in_proj", "down_proj"),
}
"""Model family -> the modules that its adapters change. Families that split, join or reorder matrices at load."""
PROMPT = [5, 9, 21, 33, 8, 70, 12, 90, 41, 7, 3, 55, 60, 61, 62, 63, 64, 65, 66, 67]
NATIVE: dict[str, Any] = {"backend": "native", "threads": 1, "kv_cache_dtype": "float32", "block_size": 16}


def folder_of(family: str) -> Path:
    return tiny_model(family, "float32").checkpoint.path


@cache
def adapter_of(family: str, seed: int = 0) -> tuple[Path, PeftModel]:
    return make_adapter(family, seed)


def make_adapter(family: str, seed: int, **settings: Any) -> tuple[Path, PeftModel]:
    """Folder of a random adapter as PEFT writes it, and PEFT's model."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 6, "target_modules": FAMILIES[family], "init_lora_weights": False, **settings}
    if isinstance(config["target_modules"], tuple):
        config["target_modules"] = list(config["target_modules"])
    model = get_peft_model(
        oracle_of(family, tiny_model(family, "float32")), LoraConfig(task_type="CAUSAL_LM", **config)
    )
    folder = new_folder() / f"adapter-{seed}"
    model.save_pretrained(str(folder))
    return folder, model.eval()


def open_llm(family: str, adapters: Mapping[str, Path], **settings: Any) -> LLM:
    return LLM(folder_of(family), lora=adapters, **{**NATIVE, **settings})


def assert_matches_oracle(llm: LLM, oracle: Any, name: str) -> None:
    """Compares logprobs of a prompt and the greedy text after it."""
    params = SamplingParams(max_tokens=12, prompt_logprobs=3, logprobs=0, ignore_eos=True)
    (found,) = llm.generate([PROMPT], params, lora=name)
    expected = torch.log_softmax(logits_of_oracle(oracle, PROMPT).double(), -1)
    assert found.prompt_logprobs is not None
    for position, entry in enumerate(found.prompt_logprobs):
        for token, value in ((entry.token, entry.logprob), *entry.top):
            assert abs(value - expected[position, token].item()) < 2e-4, (position, token)
    assert len(found.token_ids) == 12
    assert_greedy_text(oracle, PROMPT, found.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_peft(family: str) -> None:
    folder, oracle = adapter_of(family)
    for backend in ({}, {"backend": "reference"}):
        with open_llm(family, {"tuned": folder}, **({**backend, "kv_cache_dtype": None} if backend else {})) as llm:
            assert_matches_oracle(llm, oracle, "tuned")
            with oracle.disable_adapter():
                assert_matches_oracle(llm, oracle, "")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "r": 9},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
        {"target_modules": ["lm_head", "v_proj"]},
        {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
    ],
    ids=["rank-stabilized", "patterns", "lm-head", "one-layer"],
)
def test_adapter_variants_match_peft(settings: dict[str, Any]) -> None:
    folder, oracle = make_adapter("llama", 3, **settings)
    with open_llm("llama", {"tuned": folder}) as llm:
        assert_matches_oracle(llm, oracle, "tuned")


def texts_of(llm: LLM, jobs: Seq[tuple[str, Seq[int], SamplingParams]]) -> list[tuple[int, ...]]:
    """Texts of (adapter, prompt, parameters), generated in one batch."""
    requests = [llm.request(list(prompt), params, lora=name) for name, prompt, params in jobs]
    found: dict[str, tuple[int, ...]] = {}
    with llm.session() as session:
        for request in requests:
            session.submit(request)
        while session.running:
            for choice, delta in session.step():
                if delta.finish_reason is not None:
                    found[choice.request.request_id] = tuple(choice.completion().token_ids)
    return [found[request.request_id] for request in requests]


def varied_jobs() -> list[tuple[str, Seq[int], SamplingParams]]:
    """Equal prompts with each adapter and without, greedy and sampled."""
    return [
        (name, PROMPT[:length], SamplingParams(max_tokens=14, temperature=temperature, seed=length, ignore_eos=True))
        for length in (20, 9)
        for temperature in (0.0, 0.9)
        for name in ("one", "", "two")
    ]


@pytest.mark.parametrize("family", ["mimo", "qwen3_5", "phi3"])
@pytest.mark.parametrize("backend", ["native", "int8"])
def test_texts_are_independent_of_the_batch(family: str, backend: str) -> None:
    """Alone without drafts, and together with drafts, small chunks, few blocks (preemption) and the prefix cache."""
    adapters = {"one": random_adapter(folder_of(family), 1), "two": random_adapter(folder_of(family), 2, rank=7)}
    more: dict[str, Any] = {"quantization": "int8"} if backend == "int8" else {}
    with open_llm(family, adapters, drafter="none", **more) as llm:
        alone = [texts_of(llm, [job])[0] for job in varied_jobs()]
    assert len(set(alone[:3])) == 3, "the adapters change the text"
    for settings in ({}, {"max_num_batched_tokens": 16}, {"kv_blocks": 6, "max_model_len": 64}, {"depth": 2}):
        with open_llm(family, adapters, **{**more, **settings}) as llm:
            for _ in range(2):  # the second turn uses the prefix cache
                assert texts_of(llm, varied_jobs()) == alone


def test_adapters_with_different_alpha_share_no_blocks(tmp_path: Path) -> None:
    first, second = random_adapter(folder_of("mimo"), 1), tmp_path / "second"
    shutil.copytree(first, second)
    config = json.loads((first / "adapter_config.json").read_text())
    (second / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 4 * config["lora_alpha"]}))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for before in ([], ["first"]):
        with open_llm("mimo", {"first": first, "second": second}) as llm:
            found += [llm.generate([PROMPT * 2], params, lora=name)[0].token_ids for name in (*before, "second")]
    assert found[0] == found[2] != found[1]


def test_adapters_are_loaded_and_unloaded_while_texts_run() -> None:
    """Running texts keep their adapter, later requests fail, and slots are reused."""
    first, second = random_adapter(folder_of("mimo"), 1), random_adapter(folder_of("mimo"), 2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with open_llm("mimo", {"one": first}) as llm:
        alone = llm.generate([PROMPT], params, lora="one")[0].token_ids
        with llm.session() as session:
            session.submit(llm.request(PROMPT, params, lora="one"))
            session.step()
            late = llm.request(PROMPT, params, lora="one")
            llm.unload_adapter("one")
            llm.load_adapter("one", second)
            with pytest.raises(UsageError, match="'one' was unloaded"):
                session.submit(late)
            ended = [c.completion() for c, delta in iter_steps(session) if delta.finish_reason is not None]
        assert ended[0].token_ids == alone
        other = llm.generate([PROMPT], params, lora="one")[0].token_ids
        assert other != alone and list(llm.adapters) == ["one"]
        with pytest.raises(UsageError, match="is loaded already"):
            llm.load_adapter("one", first)
        llm.load_adapter("again", first)
        assert llm.generate([PROMPT], params, lora="again")[0].token_ids == alone
        for wrong in ("two", 2):
            with pytest.raises(UsageError, match=f"no LoRA adapter is named {wrong!r}"):
                llm.generate([PROMPT], params, lora=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the adapter's name is None"):
            llm.load_adapter(None, first)  # type: ignore[arg-type]


def iter_steps(session: Any) -> Any:
    while session.running:
        yield from session.step()


def test_invalid_adapters_are_refused() -> None:
    """Each error names the fault, and the model stays usable."""
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = np.ones((4, 48), np.float32), np.ones((48, 4), np.float32)
    good = {f"{q}.lora_A.weight": a, f"{q}.lora_B.weight": b}
    wrong: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = [
        (good, {"use_dora": True}, "use_dora is True, which is not supported"),
        (good, {"peft_type": "IA3"}, "peft_type is IA3"),
        (good, {"init_lora_weights": "pissa_niter_4"}, "training changes the model's own matrices"),
        (good, {"bias": "all"}, "bias is 'all'"),
        (good, {"a_later_variant": {"x": 1}}, "a_later_variant"),
        ({f"{q}.lora_A.weight": a}, {}, "only A of"),
        ({f"{q}.lora_A.weight": a[:, :40], f"{q}.lora_B.weight": b}, {}, r"q_proj.weight is \[48, 40\]"),
        ({f"{q}.lora_A.weight": a, f"{q}.lora_B.weight": b[:, :2]}, {}, "different ranks"),
        ({f"{q}.lora_A.weight": a * np.nan, f"{q}.lora_B.weight": b}, {}, "NaN or infinity"),
        ({key.replace("layers.0", "layers.77"): each for key, each in good.items()}, {}, "has no model.layers.77"),
        (good, {"lora_alpha": float("nan")}, "NaN or infinity"),
        (good, {"lora_alpha": "8"}, "is '8', not a number"),
        (good, {"alpha_pattern": [1]}, "alpha_pattern is invalid"),
        (good, {"alpha_pattern": {"(": 1}}, "alpha_pattern is invalid"),
        ({**good, f"{q}.lora_magnitude_vector": a[0]}, {}, "is no LoRA matrix"),
        ({**good, "base_model.model.lm_head.weight": np.ones((140, 48), "f4")}, {}, r"\[140, 48\], the model's is"),
        ({}, {}, "holds no LoRA matrices"),
    ]
    with open_llm("llama", {}) as llm:
        before = llm.generate([PROMPT], SamplingParams(max_tokens=5))[0].token_ids
        for arrays, config, message in wrong:
            with pytest.raises(ModelError, match=message):
                llm.load_adapter("wrong", write_adapter(arrays, {"peft_type": "LORA", "lora_alpha": 8, **config}))
        with pytest.raises(ModelError, match="does not exist"):
            llm.load_adapter("wrong", "/no/such/adapter")
        with pytest.raises(ModelError, match=r"it has no adapter_config\.json"):
            llm.load_adapter("wrong", folder_of("llama"))
        assert llm.adapters == {} and llm.generate([PROMPT], SamplingParams(max_tokens=5))[0].token_ids == before


def test_gguf_adapter_equals_the_peft_adapter(tmp_path: Path) -> None:
    """PEFT's folder and llama.cpp's file, with its order of q and k rows, on trunks of both formats."""
    model, folder = tiny_model("llama", "float32"), random_adapter(folder_of("llama"), 5)
    spec = model.config.layers[0].mixer.attention_spec
    assert spec
    heads, tensors = {"q": spec.num_heads, "k": spec.num_kv_heads}, dict[str, Any]()
    for name, tensor in safetensors_file.read_file(folder / "adapter_model.safetensors").items():
        layer, part, end = re.fullmatch(r".*layers\.(\d+)\.\w+\.(\w+)_proj\.(lora_[AB])\.weight", name).groups()  # type: ignore[union-attr]
        values = tensor.float32()
        if end == "lora_B" and part in heads:
            values = in_rope_order(values, heads[part])
        tensors[f"blk.{layer}.{NAMES_OF_PARTS[part]}.weight.{end.lower()}"] = np.ascontiguousarray(values)
    writer = gguf.GGUFWriter(str(tmp_path / "adapter.gguf"), "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    adapter = written(writer, tmp_path / "adapter.gguf")
    arrays = {name: tensor.float32() for name, tensor in model.checkpoint.tensors.items()}
    trunk = write_gguf(tmp_path / "model.gguf", dict(model.checkpoint.config), arrays)
    params, texts = SamplingParams(max_tokens=10, ignore_eos=True), set()
    for base in (folder_of("llama"), trunk):
        for path in (folder, adapter):
            with LLM(base, lora=path, **NATIVE) as llm:
                texts.add(tuple(llm.generate([PROMPT], params)[0].token_ids))
                plain = tuple(llm.generate([PROMPT], params, lora="")[0].token_ids)
    assert len(texts) == 1 and plain not in texts
    for path, kind in ((folder, "peft"), (adapter, "gguf")):
        report = inspect(InspectOptions(model=str(path), target=str(trunk)))
        assert report.ok and report.data["fits"] and (report.data["format"], report.data["rank"]) == (kind, 4)
    other = inspect(InspectOptions(model=str(adapter), target=str(folder_of("qwen3"))))
    assert not other.ok and "does not fit" in other.lines[-1]
    with pytest.raises(UsageError, match="--deep and --head are about heads"):
        inspect(InspectOptions(model=str(adapter), deep=True))


def test_unsupported_matrices_are_refused_by_name() -> None:
    kv = "model.layers.0.self_attn.kv_b_proj"
    shape = tiny_model("deepseek_v3", "float32").checkpoint.tensors[f"{kv}.weight"].shape
    rows = {f"{kv}.lora_A.weight": np.ones((2, shape[1]), "f4"), f"{kv}.lora_B.weight": np.ones((shape[0], 2), "f4")}
    with open_llm("deepseek_v3", {}) as llm, pytest.raises(ModelError, match=r"LoRA of .*kv_b_proj.* is not supported"):
        llm.load_adapter("tuned", write_adapter(rows, {"lora_alpha": 8}))
