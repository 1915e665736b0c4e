"""One question to the Hub: how long it may go unanswered, when it is asked again, and what is said meanwhile.

The client's own session is used, so that its tokens, proxies and certificates are. How long to wait is decided here:
the client's limits begin anew with every byte, and do not hold for looking up a name.
"""

import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import INFO, WARNING, getLogger
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

from vitlite.errors import DownloadError, shown
from vitlite.zoo.remote import RemoteFile, checked_token, endpoint

T = TypeVar("T")

FIRST_WORD = 3.0  # s of waiting until it is said what is waited for
TIMEOUT = 10  # s without a byte until the next try; the client's own default
TRIES = 5  # per request
FIRST_PAUSE = 0.5  # s; each pause is twice the one before, so four take 7.5 s
LONGEST_PAUSE = 60.0  # s; however long a server asks us to wait
BUSY = (408, 429, 500, 502, 503, 504)  # answers after which it is worth trying again
OFFLINE = dict.fromkeys(("1", "ON", "YES", "TRUE"), True) | dict.fromkeys(("0", "OFF", "NO", "FALSE"), False)
NO_ROUTE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)

_log = getLogger("vitlite")
_renewing = threading.Lock()
_seen_proxies: dict[str, str] = {}


class UnreachableError(DownloadError):
    """The Hub did not say anything, or nothing that can be used."""

    def __init__(self, file: RemoteFile, why: str) -> None:
        super().__init__(f"Cannot fetch {file}: {why}.")
        self.why = why


class StatusError(OSError):
    """Another answer than the bytes that were asked for."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"HTTP {response.status_code}")
        self.response = response


class Patience(NamedTuple):
    """How often a request is tried, and how long."""

    tries: int  # without an answer, or with one that says to come back later
    timeout: float  # s without a byte until the next try
    silence: float  # s without any answer until the end
    was_reachable: bool  # whether the Hub answered a moment ago: then where there is no way to it, one may come back


def patience(variable: str, silence: float, *, tries: int = TRIES, was_reachable: bool = False) -> Patience:
    """How long to wait, with the timeout that a variable of the environment may set."""
    timeout = _seconds(variable, TIMEOUT)
    return Patience(tries, timeout, max(silence, timeout), was_reachable)


def with_retries(file: RemoteFile, send: Callable[[float], T], how: Patience) -> T:
    """What `send` returns, given a timeout; tried again, after growing pauses, when the Hub is busy or does not answer.

    Where no connection can be made at all there is no waiting, unless the Hub was reachable a moment ago.

    Raises:
        UnreachableError: There is no answer.
        DownloadError: The client fails by itself.
        Exception: The client's own, where the Hub refuses.
    """
    pause, silent, tries = 0.0, 0.0, how.tries
    while True:
        began, left = time.monotonic(), how.silence - silent
        try:
            return _within(left, partial(send, min(how.timeout, left)))
        except Exception as error:
            _raise_what_will_not_pass(file, error)
            response, why = _answer_in(error), first_line(error)
            tries -= 1
            pause = next_pause(pause, response)
            silent = 0.0 if response is not None else silent + time.monotonic() - began + pause
            if tries == 0 or silent >= how.silence or _is_hopeless(error, how.was_reachable):
                raise UnreachableError(file, f"{endpoint()} cannot be reached ({why})") from error
        _log.log(WARNING if pause > FIRST_WORD else INFO, "%s: %s; trying again in %.1f s.", file, why, pause)
        time.sleep(pause)


def _within(seconds: float, send: Callable[[], T]) -> T:
    """What `send` returns, if it does in so many seconds; else its thread is left alone, as nothing can stop it."""
    answers: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put((send(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer in {seconds:.0f} s") from None
    if error is not None:
        raise error
    return cast(T, answer)


def _raise_what_will_not_pass(file: RemoteFile, error: Exception) -> None:
    """Raises an error after which it makes no sense to try again: a refusal, or a client that fails by itself."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    response = _answer_in(error)
    if isinstance(error, DownloadError) or (response is not None and response.status_code not in BUSY):
        raise error
    closed_by_another_thread = isinstance(error, RuntimeError) and "closed" in str(error)
    if not closed_by_another_thread and not isinstance(error, (OSError, transport_error(), OfflineModeIsEnabled)):
        raise DownloadError(
            f"Cannot fetch {file}: {first_line(error)}.",
            python="Check HF_ENDPOINT, and the variables of proxies and certificates.",
        ) from error


def _answer_in(error: Exception) -> Any:
    """The answer of a Hub that refuses or is busy; None where an error is of another kind."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response if isinstance(error, (HfHubHTTPError, StatusError)) else None


def next_pause(pause: float, response: Any = None) -> float:
    """As long as the server asks for, else twice the pause before; in seconds."""
    asked = "" if response is None else response.headers.get("retry-after", "")
    in_digits = asked.isascii() and asked.isdecimal()
    seconds = float(asked) if in_digits else max(2 * pause, FIRST_PAUSE)
    return min(seconds, LONGEST_PAUSE)


def _is_hopeless(error: Exception, was_reachable: bool) -> bool:
    """Whether trying again makes no sense."""
    return any(_is_for_good(cause) or (_is_no_route(cause) and not was_reachable) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what was behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_for_good(error: BaseException) -> bool:
    """The client is offline, is sent in circles, or has or gets certificates that it does not believe."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    name = type(error).__name__  # which is the same in every HTTP library
    return isinstance(error, (OfflineModeIsEnabled, FileNotFoundError, ssl.CertificateError)) or (
        name == "TooManyRedirects"
    )


def _is_no_route(error: BaseException) -> bool:
    """No such name, nobody who listens, no network."""
    return isinstance(error, socket.gaierror) or getattr(error, "errno", None) in NO_ROUTE


def first_line(error: BaseException) -> str:
    """An error of another library, fit to stand in a sentence."""
    return shown(f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0])


def transport_error() -> type[Exception]:
    """What the HTTP library raises: requests, httpx or httpx2, whose errors those of the Hub's client derive from."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


@contextmanager
def said_after_a_while(words: str) -> Iterator[None]:
    """Says on the log what is waited for, where it takes longer than a moment."""
    timer = threading.Timer(FIRST_WORD, _log.warning, ("%s", words))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---- what the environment says now


def is_offline() -> bool:
    """Whether the Hub's variables say to do without a network, in the client's words for yes and no.

    Raises:
        DownloadError: They say something else, which the client would take for no.
    """
    variable = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    value = os.environ.get(variable) or "0"
    answer = OFFLINE.get(value.upper())
    if answer is None:
        raise DownloadError(
            f"{variable} is {shown(repr(value))}, which is neither yes nor no.", python="Set it to 1, or to 0."
        )
    return answer


def _seconds(variable: str, usual: int) -> float:
    text = os.environ.get(variable) or str(usual)
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) > 0):  # others the client fails at
        raise DownloadError(
            f"{variable} is {shown(repr(text))}.", python="It is a whole number of seconds, from 1 to 99999."
        )
    return float(text)


def prepare_client() -> None:
    """The client reads the proxy variables once; where they are others now, it has to start again.

    Raises:
        DownloadError: A timeout is no number, which keeps it even from being imported.
    """
    global _seen_proxies
    from urllib.request import getproxies

    for variable in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        _seconds(variable, TIMEOUT)
    import huggingface_hub

    with _renewing:
        proxies = getproxies()
        if proxies != _seen_proxies and hasattr(huggingface_hub, "close_session"):  # before 1.0 none is needed
            huggingface_hub.close_session()
        _seen_proxies = proxies


def headers_with(token: bool | None) -> dict[str, str]:
    """The client's headers, with the user's token (None) or without one (False)."""
    from huggingface_hub.utils import build_hf_headers

    headers: dict[str, str] = build_hf_headers(token=token)
    checked_token(headers.get("authorization", "").removeprefix("Bearer "))
    return headers
