"""The pages of the documentation, and their code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Values for a page's placeholder names: the bundled task and model.
MEANT = {
    "TASK": "tiny_textvqa", "<task>": "tiny_textvqa", "MODEL": "tiny", "<model>": "tiny", "METHOD": "snapkv",
    "RATIO": "0.2", "FOLDER": "results", "PATH": "python", "DIR": "data", "HOST": "127.0.0.1", "WORD": "textvqa",
    "ENTITY": "me", "PROJECT": "mine", "ID": "abc", "NAME": "demo", "ARTIFACT": "cell", "A": "full", "B": "snapkv",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command on a page: `text` in one line, without its comment."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    @property
    def concrete(self) -> str:
        """`text` with placeholders replaced, flags without brackets, and the first of several choices."""
        text = re.sub(r" \[(?:flags|key=value \.\.\.)\]", "", self.text)
        text = re.sub(r" \[(--[^]]+|[A-Z]+)\]", r" \1", text)
        text = re.sub(r" ?\.\.\.", "", re.sub(r"\b([a-z]+)(?:\|[a-z]+)+", r"\1", text))
        return re.sub(r"<\w+>|(?<![\w$-])[A-Z]+(?![\w=-])", lambda name: MEANT.get(name[0], name[0]), text)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    return code_blocks(page, "python")


def shell_commands(page: Path) -> list[Command]:
    """Return the commands in a page's bash blocks, in order."""
    commands, parts, start, is_shell = [], [], 0, False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            is_shell = line == "```bash"
        elif is_shell:
            start = start if parts else number
            parts.append(re.sub(r"\s+# .*", "", line).rstrip("\\").strip())
            if not line.endswith("\\"):
                commands.append(Command(page, start, " ".join(parts)))
                parts = []
    return commands
