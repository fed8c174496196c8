"""Let torchvision be imported beside a CPU build of torch; run by a ``.pth`` file when the interpreter starts.

torchvision's wheel registers operators whose compiled half is linked against CUDA and cannot load here. SGLang needs
its Python half only, so the two modules that do the registering are taken for imported already.
"""

import sys
from types import ModuleType

for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
    sys.modules.setdefault(name, ModuleType(name))
