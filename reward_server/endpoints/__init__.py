"""Scorers that are remote calls. Every rule is a small state machine that is told the time (`breaker`, `limiter`, `retrying`, `hedging`,
`upstreams`, `batching`, `waiting`); `endpoint` is the one asyncio layer that asks them; `http_dialect` and `grpc_dialect` speak."""
