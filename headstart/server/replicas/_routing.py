"""The process of the router: vllm-router's own program, which ends with who has started it."""

from __future__ import annotations

from headstart.system import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    from vllm_router.launch_router import main

    main()
