"""The command line: ``ml4cube COMMAND``, a thin layer over the public calls.

A command is a function of `cubes`, `models`, `inspection`, `doctor` or `rerun`, with one or more
public callables whose arguments it takes too (`command`). `arguments` reads these from signatures
and docstrings, `configuration` merges a YAML file (read by `files`) and the options, `by_name`
makes objects of names, `task` is what a function returns: a plan, and the work. `main` lists the
commands.
"""
