"""A coding-agent workload: many sessions at once, each a growing prompt over the files of a project.

Every prompt begins with one system prompt and a map of the repository; sessions on the same project also
share its context files. A session then reads files, edits them, reads them again, now and then asks for the
same answer anew or goes back a few steps and on another way, and when its prompt grows too long, goes on
from a summary. So prefixes are shared within a session, between sessions of a project, and between all, as
they are with real agents."""

from collections import deque
from collections.abc import Iterator
from random import Random

from engine_adapters.replay.hashing import TOKEN_BYTES
from engine_adapters.replay.requests import Request
from engine_adapters.replay.sources import Library, Tokeniser

SESSIONS_ACTIVE = 12
SESSION_GAP = 6
"""A session's next request comes at least this many requests after its last: meanwhile somebody reads the
answer."""

TURNS_MIN = 6
TURNS_MAX = 18
EXCERPT_LINES_MAX = 220

SYSTEM_PROMPT = """\
You are a careful software engineer who works in a repository through tools. You are given a task, and you
see the repository only through what the tools return.

How to work
- Read before you change. Never guess what a file contains; open it, and open what it imports when that
  matters.
- Make the smallest change that does the whole task. Keep the style of the code around it.
- After an edit read the place again, and run the tests that cover it.
- When a test fails, find out why before you change anything else. A test that was made to pass by weakening
  it is a failure that you hid.
- Say what you did not do and what you are not sure of.

Tools
- read(path, first_line, last_line): the lines of a file, numbered. Without line numbers the whole file,
  shortened in the middle when it is long.
- edit(path, old, new): replaces one exact, unique occurrence of a text. It fails when the text is absent or
  occurs more than once; then read the file again, it may have changed since.
- search(pattern, folder): lines that match a regular expression, with their paths and line numbers.
- run(command): runs a command in the root of the repository and returns its output and exit status.
- done(summary): ends the task. The summary says what was changed and how it was checked, in at most five
  sentences.

Format
Think first, in a few sentences. Then call exactly one tool. You get its result as the next message. Do not
invent results, and do not call a tool in the same message in which you finish.

Files of the repository
"""

TASKS = (
    "Find out why {file} treats an empty input as an error and make it return an empty result instead.",
    "Add type annotations to the public functions of {file} and keep its behaviour as it is.",
    "The documentation of {file} says less than the code does. Bring the docstrings up to date.",
    "A user reports that {file} is slow with large inputs. Find the slowest loop and make it linear.",
    "Split the longest function of {file} into parts that can be tested on their own.",
    "Make the errors that {file} raises name the offending value and its place.",
    "Review {file} for resources that stay open when an exception is raised, and close them.",
)
FOLLOW_UPS = (
    "Good. Now check that nothing else in the project relied on the old behaviour.",
    "Please explain the change to {file} before you go on.",
    "The tests in continuous integration fail on another platform. Look at {file} again.",
    "Can this be done without the new helper in {file}?",
    "Also handle the case in which the argument is None.",
)


class Workload:
    """Yields the same requests for the same library, seed and number, in any process."""

    def __init__(
        self, *, requests: int, seed: int, prompt_tokens_max: int = 24_000, library: Library | None = None
    ) -> None:
        """`prompt_tokens_max`: a session whose prompt grew longer goes on from a summary."""
        self._count = requests
        self._seed = seed
        self._tokens_max = prompt_tokens_max
        self._library = library or Library()
        self._tokeniser = Tokeniser()

    def __iter__(self) -> Iterator[Request]:
        """The requests in order, sessions interleaved."""
        chance = Random(f"workload/{self._seed}")  # noqa: S311 - a workload is drawn, not a secret
        sessions = [self._session(number) for number in range(SESSIONS_ACTIVE)]
        started = SESSIONS_ACTIVE
        recent: deque[str] = deque(maxlen=SESSION_GAP)
        for index in range(self._count):
            at = chance.choice([i for i, session in enumerate(sessions) if session.name not in recent])
            session = sessions[at]
            tokens = session.next_prompt()
            recent.append(session.name)
            if session.turns_left == 0:
                sessions[at] = self._session(started)
                started += 1
            yield Request(
                index=index, session=session.name, tokens_count=len(tokens) // TOKEN_BYTES, tokens=tokens
            )

    def _session(self, number: int) -> "_Session":
        return _Session(
            f"s{number:04d}",
            Random(f"session/{self._seed}/{number}"),  # noqa: S311
            self._library,
            self._tokeniser,
            self._tokens_max,
        )


class _Session:
    """One agent at one task: a list of messages that grows, and is sent whole with every request."""

    def __init__(
        self, name: str, chance: Random, library: Library, tokeniser: Tokeniser, tokens_max: int
    ) -> None:
        self.name = name
        self.turns_left = chance.randint(TURNS_MIN, TURNS_MAX)
        self._chance = chance
        self._library = library
        self._tokeniser = tokeniser
        self._bytes_max = tokens_max * TOKEN_BYTES
        project = chance.choice(list(library.projects))
        self._files = library.projects[project]
        self._edited: dict[str, str] = {}
        self._read: list[str] = []
        self._shared = [
            tokeniser.encode(SYSTEM_PROMPT + library.map),
            *(self._message("context", library.text(file)) for file in self._files[:1]),
        ]
        self._task = self._message("task", chance.choice(TASKS).format(file=chance.choice(self._files)))
        self._history: list[bytes] = [*self._shared, self._task]
        self._fresh = True

    def next_prompt(self) -> bytes:
        """The packed tokens of the session's next request."""
        self.turns_left -= 1
        if self._fresh:
            self._fresh = False
        else:
            self._go_on()
        return b"".join(self._history)

    def _go_on(self) -> None:
        step = self._chance.random()
        if step < 0.04:
            return  # the same answer once more
        if step < 0.10 and len(self._history) > len(self._shared) + 4:
            del self._history[-self._chance.randint(2, 3) :]
            self._ask()
        elif step < 0.45 or not self._read:
            self._read_file(self._chance.choice(self._files))
        elif step < 0.60:
            self._read_file(self._chance.choice(self._read))
        elif step < 0.85:
            self._edit_file(self._chance.choice(self._read))
        else:
            self._ask()
        if sum(map(len, self._history)) > self._bytes_max:
            self._summarise()

    def _ask(self) -> None:
        file = self._chance.choice(self._read or self._files)
        self._say("user", self._chance.choice(FOLLOW_UPS).format(file=file))

    def _read_file(self, name: str) -> None:
        lines = self._text(name).splitlines()
        first = (
            self._chance.randrange(max(1, len(lines) - EXCERPT_LINES_MAX))
            if self._chance.random() < 0.3
            else 0
        )
        shown = lines[first : first + EXCERPT_LINES_MAX]
        self._say("assistant", f"I look at {name}.\nread({name!r}, {first + 1}, {first + len(shown)})")
        self._say("result", "\n".join(f"{first + i + 1}: {line}" for i, line in enumerate(shown)))
        if name not in self._read:
            self._read.append(name)

    def _edit_file(self, name: str) -> None:
        lines = self._text(name).splitlines()
        at = self._chance.randrange(len(lines))
        old = "\n".join(lines[at : at + self._chance.randint(2, 12)])
        new = f"{lines[at]}  # checked for task {self.name}\n{old}"
        self._edited[name] = "\n".join([*lines[:at], *new.splitlines(), *lines[at + 1 :]])
        self._say("assistant", f"This place has to change.\nedit({name!r}, {old!r}, {new!r})")
        self._say("result", f"edited {name}: line {at + 1}")

    def _summarise(self) -> None:
        """A summary takes the place of the history: from the task on, nothing of the old prefix is left."""
        looked_at = "\n".join(f"- {name}: {len(self._text(name).splitlines())} lines" for name in self._read)
        self._history = [*self._shared, self._task]
        self._say("summary", f"So far these files were read:\n{looked_at}\nEdited: {sorted(self._edited)}")

    def _text(self, name: str) -> str:
        return self._edited.get(name) or self._library.text(name)

    def _say(self, who: str, text: str) -> None:
        self._history.append(self._message(who, text))

    def _message(self, who: str, text: str) -> bytes:
        return self._tokeniser.encode(f"\n<{who}>\n{text}\n</{who}>\n")
