from pd_serve.errors import TransportUnavailableError


class UcxPyBinding:
    def __init__(self) -> None:
        raise TransportUnavailableError("later")
