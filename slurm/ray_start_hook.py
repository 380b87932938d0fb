"""Called by ``ray start`` (RAY_START_HOOK): what its flags cannot say."""


def no_ray_client(params, _head: bool) -> None:
    """The Ray client server would listen on port 10001, whose flag has no value for "off"."""
    params.ray_client_server_port = None
