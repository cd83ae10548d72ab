"""llama.cpp: `--spec-type` switches drafting on; its flags were renamed in 2026."""

from headstart.errors import UsageError
from headstart.tools.draft_depth import P_MIN
from headstart.tools.launch.arguments import Version
from headstart.tools.launch.command_line import CommandLine
from headstart.tools.launch.launcher import EngineLauncher, ServerBuilder


class LlamaCpp(EngineLauncher, data="llamacpp.json"):
    def build(self, server: ServerBuilder) -> None:
        spec = server.spec
        if spec.parallel.nodes > 1:
            raise UsageError("llama-server runs on one machine", "--nodes 1; --dp runs copies side by side")
        self._model(server)
        server.add_all({"--host": spec.host, "--port": spec.port, "--metrics": None})
        if spec.parallel.gpus:
            server.add("--n-gpu-layers", "all")
        if cpus := [cpu for each in spec.placement.cpus for cpu in each]:
            server.add_all({"--threads": len(cpus), "--cpu-mask": f"{sum(1 << cpu for cpu in cpus):x}"})
        if spec.depth:
            self._speculation(server)
        settings = dict(spec.settings)
        if length := settings.pop("max_model_len", None):  # shared by all slots
            server.add("--ctx-size", int(length) * int(settings.get("max_num_seqs") or 1))
        server.add_settings(settings)
        server.serve(self.program, *server.words)

    def _model(self, server: ServerBuilder) -> None:
        source = server.facts.source
        if server.facts.local:
            server.add("--model", source)
        else:
            owner, name, *file = source.split("/", 2)
            server.add("--hf-repo", f"{owner}/{name}")
            for each in file:
                server.add("--hf-file", each)

    def _speculation(self, server: ServerBuilder) -> None:
        spec = server.spec
        if spec.drafter and spec.drafter.container != "gguf":
            raise UsageError(f"--head {spec.head} is not a GGUF file", "convert it: convert_hf_to_gguf.py --mtp")
        if repo := spec.head_repo:
            if repo.file or repo.revision:
                hint = f"hf download {repo.repo}, and --head with the path of the file"
                raise UsageError(f"--head {spec.head}: llama.cpp takes whole repos as drafters", hint)
            server.add("--spec-draft-hf", repo.repo)
        elif spec.head:
            server.add("--spec-draft-model", spec.head)
        server.add("--spec-type", self.method_of(spec))  # without a type, heads of some kinds are loaded and not used
        server.add_all({"--spec-draft-n-max": spec.depth, "--spec-draft-p-min": P_MIN})
        server.note("logprobs are missing from answers while drafting")

    def modernize(self, line: CommandLine, version: Version) -> None:
        line.rename_value("--spec-type", self.methods)
        if line.find("-mtp"):
            line.drop("-mtp", "it is --spec-type draft-mtp now", switch=True)
            line.put("--spec-type", "draft-mtp")
        attention = line.find("--flash-attn")
        if attention and attention.value not in ("on", "off", "auto"):
            line.drop(attention.flag, "it takes on, off or auto now", switch=True)
            line.put("--flash-attn", "on")
        for word in [each for each in line.words if each.joined]:
            line.remove(word)
            line.put(word.flag, word.value)
            line.changes.append(f"{word.flag}={word.value} -> {word.flag} {word.value}")


LAUNCHER = LlamaCpp()
