"""SGLang: steps and draft tokens are separate flags; while drafting SGLang runs 48 requests by default."""

import json

from headstart.errors import UsageError
from headstart.tools.launch.arguments import Version, at_least
from headstart.tools.launch.command_line import ArgumentWord, CommandLine
from headstart.tools.launch.launcher import BOTH_SIDES, OFFLOAD, CommandBuilder, EngineLauncher, ServerBuilder

DEFAULT_REQUESTS = 256  # our --max-running-requests; while drafting SGLang's own default is 48
OWN_DRAFT = ("deepseek", "glm4", "glm_moe", "bailing", "hunyuan", "hy_v", "qwen4", "mistral")
"""Prefixes of model types for which SGLang uses the target checkpoint itself as draft model."""
REJECTION = ("NEXTN", "EAGLE", "EAGLE3")  # algorithms with rejection sampling
BLOCKS = ("DFLASH", "DSPARK")  # algorithms that draft a block at once; they verify depth + 1 tokens
MAX_TREE_TOKENS = 8  # size of the draft tree that SGLang chooses for 5 steps and top-k 4


class Sglang(EngineLauncher, data="sglang.json"):
    def build(self, server: ServerBuilder) -> None:
        spec, parallel = server.spec, server.spec.parallel
        if spec.role and spec.platform == "cpu":
            raise UsageError("SGLang hands caches over between GPUs only", "vllm does it on a CPU too")
        if parallel.nodes > 1 and parallel.data > 1:
            raise UsageError("SGLang's copies side by side do not span nodes", "--dp 1, or one server for each node")
        server.add_all({"--model-path": server.facts.source, "--host": spec.host, "--port": spec.port})
        server.add("--enable-metrics")
        if spec.platform in ("cpu", "npu", "xpu"):
            server.add("--device", spec.platform)
        server.add_sizes({"--tp-size": parallel.tensor, "--dp-size": parallel.data, "--ep-size": parallel.expert})
        if spec.depth:
            self._speculation(server)
        self._caches(server)
        server.add_settings(spec.settings)
        for rank in range(parallel.nodes):
            node = CommandBuilder(self, server.version)
            if parallel.nodes > 1:
                node.add_all({"--nnodes": parallel.nodes, "--node-rank": rank})
                node.add("--dist-init-addr", f"{parallel.head_node}:20000")
            where = f"node {rank}" if parallel.nodes > 1 else ""
            words = ("python", "-m", "sglang.launch_server", *server.words, *node.words)
            server.serve(*words, node=rank, where=where, answers=rank == 0)

    def _caches(self, server: ServerBuilder) -> None:
        spec = server.spec
        if spec.role:
            server.add("--disaggregation-mode", spec.role)
        if spec.role == "prefill":
            server.add("--disaggregation-bootstrap-port", (self.bootstrap_port or 0) + spec.placement.number)
            if spec.depth:  # decode goes on from hidden states of prefill's drafter
                server.note(BOTH_SIDES)
        if spec.kv_offload_gb:
            server.add_all({"--enable-hierarchical-cache": None, "--hicache-size": spec.kv_offload_gb})
            if spec.depth_drafted:
                server.note(OFFLOAD)

    def _speculation(self, server: ServerBuilder) -> None:
        spec, model_type = server.spec, server.facts.model_type
        algorithm, depth = self.method_of(spec), spec.depth
        if algorithm == "NEXTN" and model_type == "deepseek_v4":
            algorithm = "EAGLE"  # same algorithm; SGLang checks this model type before it resolves the alias NEXTN
        server.add("--speculative-algorithm", algorithm)
        repo = spec.head_repo
        path = repo.repo if repo else spec.head or server.facts.source
        if spec.head or not model_type.startswith(OWN_DRAFT):
            server.add("--speculative-draft-model-path", path)
        if revision := repo.revision if repo else "" if spec.head else server.facts.revision:
            server.add("--speculative-draft-model-revision", revision)
        if algorithm in BLOCKS:
            server.add("--speculative-num-draft-tokens", depth + 1)
            if algorithm == "DSPARK":
                server.add("--speculative-dspark-block-size", depth)
        else:
            depth = self._depth_table(server) if spec.depth_table else depth
            server.add_all({"--speculative-num-steps": depth, "--speculative-eagle-topk": 1})
            server.add("--speculative-num-draft-tokens", depth + 1)
        if "max_num_seqs" not in spec.settings:
            server.add("--max-running-requests", DEFAULT_REQUESTS)
            silent = "without --max-running-requests SGLang takes 48 while drafting"
            server.note(f"{silent}; {DEFAULT_REQUESTS} asked")
        self._sampling(server, algorithm)

    def _depth_table(self, server: ServerBuilder) -> int:
        """Adds adaptive.json with a depth for each batch size. Returns the largest depth, with which SGLang starts.
        Raises UsageError for a table without drafts."""
        table = server.spec.depth_table
        deepest = max(deep for _, _, deep in table)
        if not deepest:
            raise UsageError("--depth-by-batch drafts nothing in any row", "use --depth 0 instead")
        steps = {str(low): {"candidate_steps": [deep]} for low, _, deep in table}
        server.plan.files["adaptive.json"] = json.dumps(steps, indent=1) + "\n"
        server.plan.facts["adaptive.steps"] = [deep for _, _, deep in table]
        server.add_all({"--speculative-adaptive": None, "--speculative-adaptive-config": "adaptive.json"})
        return deepest

    def _sampling(self, server: ServerBuilder, algorithm: str) -> None:
        """Switches rejection sampling on, which accepts more drafts, if SGLang supports it for this drafter."""
        drafter = server.spec.drafter
        if server.spec.platform == "cpu":
            server.note("on a CPU SGLang verifies by argmax: temperature is ignored while drafting")
        elif not server.has("--speculative-use-rejection-sampling") or algorithm not in REJECTION:
            pass
        elif drafter and (drafter.reduced_vocabulary or drafter.kind == "assistant"):
            why = "draws from a part of the vocabulary" if drafter.reduced_vocabulary else "is a Gemma 4 assistant"
            server.note(f"the head {why}: SGLang's rejection sampling cannot be used; its default rule is exact too")
        else:
            server.add("--speculative-use-rejection-sampling")
            server.note("rejection sampling accepts more than the default rule; both are exact")
        server.note("min_p is ignored while drafting")

    def modernize(self, line: CommandLine, version: Version) -> None:
        line.rename("--speculative-algo", "--speculative-algorithm")
        line.rename("--speculative-draft", "--speculative-draft-model-path")  # abbreviated
        line.rename_value("--speculative-algorithm", {"MTP": "NEXTN", "LOOKAHEAD": "NGRAM"})
        line.drop_variable("SGLANG_ENABLE_SPEC_V2", "there is one way to draft now")
        for old, (flag, value) in self.replaced.items():
            if line.take(old):
                line.put(flag, value)
                line.changes.append(f"{old} -> {flag} {value}")
        if line.find("--enable-ep-moe") and not line.find("--ep-size"):
            tensor = line.find("--tp-size", "--tp")
            line.put("--ep-size", tensor.value if tensor and tensor.value else "1")
        _complete_tree(line)
        drafts = line.find("--speculative-algorithm")
        if drafts and at_least(version, "0.5") and not line.find("--max-running-requests"):
            line.put("--max-running-requests", str(DEFAULT_REQUESTS))
            added = f"--max-running-requests {DEFAULT_REQUESTS} added"
            line.changes.append(f"{added}: 48 is the silent default with drafts")


def _complete_tree(line: CommandLine) -> None:
    """Adds or corrects --speculative-eagle-topk and --speculative-num-draft-tokens, which SGLang requires when
    --speculative-num-steps is given."""
    steps, width = _number(line.find("--speculative-num-steps")), line.find("--speculative-eagle-topk")
    drafts = line.find("--speculative-num-draft-tokens")
    if steps is None:
        return
    if width is None:
        line.put("--speculative-eagle-topk", "1")
        line.changes.append("--speculative-eagle-topk 1 added: --speculative-num-steps needs it")
    wide = _number(width) or 1
    if wide == 1 and drafts and drafts.value != str(steps + 1):
        line.changes.append(f"--speculative-num-draft-tokens {drafts.value} -> {steps + 1}: steps + 1")
        drafts.value = str(steps + 1)
    if wide > 1 and drafts is None:
        size = min(1 + wide + (steps - 1) * wide * wide, MAX_TREE_TOKENS)
        line.put("--speculative-num-draft-tokens", str(size))
        line.changes.append(f"--speculative-num-draft-tokens {size} added: a tree {wide} wide needs its size")


def _number(word: ArgumentWord | None) -> int | None:
    return int(word.value) if word and (word.value or "").isdecimal() else None  # type: ignore[arg-type]


LAUNCHER = Sglang()
