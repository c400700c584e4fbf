"Compile fakegpu.cpp, once for each version of it and of PyTorch and Python"
import fcntl,hashlib,importlib.util,logging,os,shutil,sys,sysconfig,tempfile
from pathlib import Path
import torch

logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)   # it warns that there is no GPU, which we know
from torch.utils import cpp_extension

source = Path(__file__).with_name('fakegpu.cpp')
name   = 'fakegpu_ext'
# pip puts ninja beside python, where nobody looks unless the environment is active
os.environ['PATH'] += os.pathsep+str(Path(sys.executable).parent)

def missing():
    "What it needs and this machine lacks, in words, or `None`"
    cxx = os.environ.get('CXX', 'c++')
    if tuple(map(int, torch.__version__.split('.')[:2]))<(2,10): return 'PyTorch 2.10 or later'
    if not shutil.which(cxx): return f'a C++ compiler ({cxx})'
    if not cpp_extension.is_ninja_available(): return 'ninja (pip install ninja)'
    if not Path(sysconfig.get_path('include'), 'Python.h').exists(): return 'the headers of Python (python3-dev)'

def _load(file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def _compile(folder):
    os.environ.setdefault('MAX_JOBS', '1')
    flags = ['-O1', '-std=c++20', '-w']
    return cpp_extension.load(name, [str(source)], build_directory=folder, with_cuda=False, extra_cflags=flags)

def load():
    "The compiled module. Of processes that begin at the same time, one compiles it, and the others wait"
    key = hashlib.sha256(source.read_bytes()+f'{torch.__version__} {sys.version}'.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f'fakegpu-{os.getuid()}')
    folder.mkdir(mode=0o700, exist_ok=True)
    done = folder/f'{key}.so'
    with open(folder/'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)   # which ends with the process, too
        if done.exists(): return _load(done)
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            module = _compile(tmp)
            os.replace(Path(tmp, f'{name}.so'), done)
        return module
