"""Builds the native kernel where there is a C compiler; without one, penstock computes by torch and numpy alone."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-g0"]

setup(
    ext_modules=[
        Extension(
            "penstock.native._kernel",
            ["penstock/native/kernel.c"],
            extra_compile_args=FLAGS,
            optional=True,
        )
    ]
)
