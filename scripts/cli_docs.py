#!/usr/bin/env python3
"""docs/cli.md: the help of every command of the program, as it prints it.

usage: cli_docs.py write|check CHIASMA CLI11_VERSION DOCUMENT
"""
import re
import subprocess
import sys

HEAD = """# The command line

<!-- Written by `cmake --build build/ci --target cli_docs`; layout by CLI11 {version}. Do not edit: the words are those of cli/. -->

Options may be written `--name value` or `--name=value`. {footer}
"""
SKIPPED = 77


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def strip_lines(text):
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def document(program, version):
    top = strip_lines(output(program, "--help"))
    names = re.findall(r"^  (\w+)  +\S", top[top.index("Subcommands:") :], re.MULTILINE)
    footer = "\n".join(top.splitlines()[-2:])
    exit_codes = footer.splitlines()[0]
    sections = [HEAD.format(version=version, footer=exit_codes)]
    for name in names:
        text = strip_lines(output(program, name, "--help")).removesuffix(footer).strip()
        sections.append(f"## `chiasma {name}`\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def main(action, program, version, path):
    if action == "write":
        with open(path, "w", encoding="utf-8") as file:
            file.write(document(program, version))
        return 0
    with open(path, encoding="utf-8") as file:
        current = file.read()
    if f"CLI11 {version}." not in current:
        print(f"SKIPPED: {path} was laid out by another version of CLI11 than {version}")
        return SKIPPED
    if current == document(program, version):
        return 0
    print(f"{path} is not what the program's --help says; run: cmake --build build/ci --target cli_docs")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
