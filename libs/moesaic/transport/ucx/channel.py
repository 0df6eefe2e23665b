"""Channels over UCX endpoints, and the UCX worker that carries them, as C functions see them."""

from moesaic.native.library import lib, library
from moesaic.transport.rings.channel import Channel


class UcxPlane:
    """A UCX worker whose messages all belong to channels. Made where ``of`` finds that it can be."""

    def __init__(self, c: int, descriptor: int) -> None:
        """Take over ``c``, of the UCX worker with this file descriptor."""
        self.c, self.descriptor = c, descriptor

    @classmethod
    def of(cls, worker: int, descriptor: int, max_bytes: int) -> "UcxPlane | None":
        """Let C functions progress a UCX worker.

        Args:
            worker: handle of the UCX worker.
            descriptor: becomes readable when it has something to do.
            max_bytes: a longer message breaks its channel.

        Returns:
            ``None``: there are no C functions here, or these do not find UCX.
        """
        kernels = library()
        if kernels is None:
            return None
        found = kernels.ucx_plane_open(worker=worker, descriptor=descriptor, most=max_bytes)
        return cls(found, descriptor) if found else None

    def progress(self) -> bool:
        """Move messages; true if one did."""
        return bool(lib().ucx_plane_progress(plane=self.c))

    def close(self) -> None:
        """Call UCX no more."""
        lib().ucx_plane_close(plane=self.c)


class UcxChannel(Channel):
    """A channel over an endpoint of a plane."""

    def __init__(self, plane: UcxPlane, endpoint: int, tags: tuple[int, int], control: int) -> None:
        """``tags`` are those to send and to receive by; ``control`` becomes readable when the peer is gone."""
        super().__init__(
            lib().channel_open_ucx(
                plane=plane.c,
                endpoint=endpoint,
                send_tag=tags[0],
                receive_tag=tags[1],
                control=control,
            ),
            plane.descriptor,
        )

    def sleep(self) -> bool:
        """Leave it to the worker, which arms itself."""
        return True

    def close(self) -> None:
        """See ``Channel.close``; further messages for it are dropped."""
        super().close()
        lib().channel_unlink(channel=self.c)
