"""The main job on real data: sea surface temperatures, six times finer than what is given.

Run it with ``make demo`` or ``python -m ml4cube.demo --out demo-output``. It uses the public
API only, so each step can be copied into a script of one's own.
"""
