"""TensorRT-LLM: speculation is configured in a YAML file.

Version 1.3 renamed the key of the depth and added depths by batch size for MTP and EAGLE-3. From 1.3 on,
draft_len_schedule maps the largest batch size of each row to its depth; older versions use the smallest.
"""

from typing import Any

from headstart.errors import UsageError
from headstart.tools.launch.arguments import Version, at_least, version_text
from headstart.tools.launch.command_line import CommandLine
from headstart.tools.launch.launcher import EngineLauncher, ServerBuilder, dump_yaml

RENAMED_IN = "1.3"
DEPTH_FLAGS = ("--max_draft_len", "--num_nextn_predict_layers")


class TrtLlm(EngineLauncher, data="trtllm.json"):
    """Builds `trtllm-serve MODEL --extra_llm_api_options extra.yaml`, a spelling that every version accepts."""

    def build(self, server: ServerBuilder) -> None:
        spec, parallel = server.spec, server.spec.parallel
        server.add_all({"--host": spec.host, "--port": spec.port, "--extra_llm_api_options": "extra.yaml"})
        server.add_sizes({"--tp_size": parallel.tensor, "--ep_size": parallel.expert})
        config: dict[str, Any] = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
        if spec.depth_drafted:
            config["speculative_config"] = server.plan.facts["speculative_config"] = self._speculation(server)
        server.plan.files["extra.yaml"] = dump_yaml(server.config("config", config))
        server.add_settings(spec.settings)
        words = [self.program, server.facts.source, *server.words]
        if parallel.nodes > 1:
            words = ["mpirun", "-n", str(parallel.tensor), "trtllm-llmapi-launch", *words]
            server.note("across nodes it runs under MPI or Slurm: give mpirun the host list")
        server.serve(*words)

    def _speculation(self, server: ServerBuilder) -> dict[str, Any]:
        spec, is_new = server.spec, at_least(server.version, RENAMED_IN)
        config: dict[str, Any] = {"decoding_type": self.method_of(spec)}
        is_old_key = spec.method == "mtp" and not is_new
        config["num_nextn_predict_layers" if is_old_key else "max_draft_len"] = spec.depth
        if spec.head:
            config["speculative_model"] = spec.head
        if table := spec.depth_table:
            if not is_new:
                what = f"TensorRT-LLM {version_text(server.version)} drafts to one depth with heads"
                raise UsageError(what, "leave --depth-by-batch out")
            config["draft_len_schedule"] = _schedule(table)
            config["max_draft_len"] = table[0][2]
        server.note("logprobs and penalties are refused while drafting; pipeline parallelism does not go with it")
        return server.config("speculative_config", config)

    def modernize(self, line: CommandLine, version: Version) -> None:
        """Renames keys of the YAML file too, which people paste into command lines."""
        for word in line.words:
            if word.value:
                word.value, changes, warnings = self.modernize_config(word.value, version)
                line.changes += changes
                line.warnings += warnings
            if word.flag in DEPTH_FLAGS:
                line.warnings.append(f"{word.flag} is a key of speculative_config in the YAML file, not a flag")

    def modernize_config(self, text: str, version: Version) -> tuple[str, list[str], list[str]]:
        old_key, key = "max_draft_len", "num_nextn_predict_layers"
        if is_new := at_least(version, RENAMED_IN):
            old_key, key = key, old_key
        stale = (key for key in ("use_sa_spec", "sa_spec_threshold") if key in text)
        warnings = [f"{key} is now part of sa_config" for key in stale]
        if old_key not in text or not (is_new or "MTP" in text):  # other drafters have always had max_draft_len
            return text, [], warnings
        return text.replace(old_key, key), [f"{old_key} -> {key}"], warnings


def _schedule(table: list[list[int]]) -> dict[int, int]:
    """Returns {largest batch size: depth} for the rows of a table; larger batches draft nothing. Raises UsageError
    unless the first row has the largest depth."""
    depths = [depth for _, _, depth in table]
    if not depths[0] or max(depths) > depths[0]:
        what = f"--depth-by-batch begins with depth {depths[0]}, but TensorRT-LLM needs the largest depth first"
        raise UsageError(what, "for example [[1, 4, 3], [5, 64, 0]]")
    ends = [low - 1 for low, _, _ in table[1:]] + [table[-1][1]]
    return dict(zip(ends, depths, strict=True))


LAUNCHER = TrtLlm()
