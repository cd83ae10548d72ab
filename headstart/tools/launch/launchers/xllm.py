"""xLLM: an MTP head is exported to a separate checkpoint first; each device has its own process."""

from headstart.errors import UsageError
from headstart.tools.launch.launcher import CommandBuilder, EngineLauncher, ServerBuilder
from headstart.tools.launch.spec import VISIBLE, LaunchStep


class Xllm(EngineLauncher, data="xllm.json"):
    def build(self, server: ServerBuilder) -> None:
        facts, spec = server.facts, server.spec
        model = facts.source
        if not facts.local:  # it takes directories only
            model = f"./{facts.source.rpartition('/')[2]}"
            revision = ("--revision", facts.revision) if facts.revision else ()
            step = LaunchStep(("hf", "download", facts.source, *revision, "--local-dir", model), "once")
            server.plan.before.append(step)
        server.add_all({"--model": model, "--host": spec.host})
        if spec.depth_drafted:
            self._speculation(server, model)
        server.add_sizes({"--dp_size": spec.parallel.data})
        if spec.role:
            server.add_all({"--enable_disagg_pd": None, "--instance_role": spec.role.upper()})
        server.add_settings({name: value for name, value in spec.settings.items() if name != "revision"})
        num_ranks = spec.parallel.tensor * spec.parallel.data
        for rank in range(num_ranks):
            self._serve_rank(server, rank, num_ranks)

    def _serve_rank(self, server: ServerBuilder, rank: int, num_ranks: int) -> None:
        """Adds the process of one device. xLLM uses the visible device whose index is the rank within the node."""
        spec, parallel = server.spec, server.spec.parallel
        own, per_node = CommandBuilder(self, server.version), -(-num_ranks // parallel.nodes)
        node, device = divmod(rank, per_node)
        own.add("--port", spec.port + rank)
        if num_ranks > 1:
            own.add("--master_node_addr", f"{parallel.head_node if parallel.nodes > 1 else '127.0.0.1'}:29500")
            own.add_all({"--nnodes": num_ranks, "--node_rank": rank})
        where = f"device {device}" if num_ranks > 1 else ""
        where = f"node {node}, {where}" if parallel.nodes > 1 else where
        visible = {VISIBLE[spec.platform]: ",".join(map(str, range(per_node)))}
        server.serve(self.program, *server.words, *own.words, node=node, where=where, answers=rank == 0, **visible)

    def _speculation(self, server: ServerBuilder, model: str) -> None:
        spec, head = server.spec, server.spec.head
        algorithm = self.method_of(spec)
        if head is None and spec.drafter:
            what = f"xLLM does not draft with the head of {spec.drafter.title}"
            raise UsageError(what, "--depth 0; vLLM and SGLang have it")
        if head is None:
            head = f"{model.rstrip('/')}-mtp"
            export = LaunchStep(("headstart", "export", model, "--to", "xllm", "--out", head), "once")
            server.plan.before.append(export)
        server.add_all({"--draft_model": head, "--num_speculative_tokens": spec.depth})
        server.add("--speculative_algorithm", algorithm)
        if spec.depth_table:
            server.add("--enable_adaptive_speculative_decode")
            server.note("xLLM sizes drafts by its own measurements: the table is replaced by that")
        inexact = "sampling while drafting is not exact in xLLM"
        server.note(f"{inexact}: it keeps the probability of the drafted token only")


LAUNCHER = Xllm()
