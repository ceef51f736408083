"""How is the native code built? As plain shared libraries; where there is no compiler, without them.

Everything else about the package stands in pyproject.toml.
"""

import sysconfig

from setuptools import Extension, setup

# The flags follow GCC and Clang. Fused multiply-adds are written out where PyTorch's kernels have them, so the compiler
# must not add any; neither of the other two changes a result.
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
# It calls nothing of Python's, so one wheel serves all versions. Those without the lock have no tag for that.
_ANY_PYTHON = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "headrace.optim._kernel",
            sources=["headrace/optim/csrc/kernel.cpp"],
            depends=[
                "headrace/optim/csrc/kernel.h",
                "headrace/optim/csrc/kernel_body.h",
                "headrace/optim/csrc/kernel_numbers.h",
            ],
            extra_compile_args=_FLAGS,
            language="c++",
            py_limited_api=_ANY_PYTHON,
            optional=True,  # without a compiler the package installs all the same
        ),
        Extension(
            "headrace.memory.packed._kernel",
            sources=["headrace/memory/packed/csrc/packed.cpp"],
            extra_compile_args=_FLAGS,
            language="c++",
            py_limited_api=_ANY_PYTHON,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if _ANY_PYTHON else {},
)
