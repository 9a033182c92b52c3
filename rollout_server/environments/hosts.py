"""Which host plays a configured environment."""

from __future__ import annotations

import os

from protos.mistakes import check_address
from protos.scrubbing import scrubbed
from protos.security import OPEN, Security, resolve
from rollout_server.config import RolloutConfig
from rollout_server.environment_config import REMOTE, EnvironmentConfig
from rollout_server.environments.host import Host, ProcessHost
from rollout_server.environments.remote import RemoteHost
from rollout_server.episodes import Agents, Episodes, Place
from rollout_server.tokens import Tokens


def host_of(config: EnvironmentConfig, security: Security = OPEN, *, named: tuple[str, ...] = ()) -> Host:
    """security: towards an environment server. named: environment variables that hold credentials, which no environment sees."""
    if config.is_remote:
        check_address(f"environment {config.name}: use", config.use.removeprefix(REMOTE))
        return RemoteHost(config, security)
    return ProcessHost(config, environment=scrubbed(os.environ, named=[name for name in named if name]))


def episodes_of(config: RolloutConfig, tokens: Tokens, agents: Agents | None) -> Episodes | None:
    """None where samples are single answers. agents: the endpoint, where there is one."""
    if not config.environments:
        return None
    return Episodes([Place(config=each, host=host_of(each, resolve(config.security), named=(config.security.token_env,))) for each in config.environments], tokens, agents=agents)
