"""vLLM's engines share their KV blocks through the service.

`connector.py` is what vLLM loads (`kv_connector_module_path = "engine_adapters.vllm.connector"`,
`kv_connector = "UcmConnector"`); it, `prom.py`, `describe.py`, `layout.py` and `events.py` are all that knows
vLLM. Its scheduler's side (`scheduler.py`, with `broker.py`) decides and never waits; its workers' side
(`worker.py`, with `loader.py` and `saver.py`) moves pages; `orders.py` is what the two tell each other.
"""
