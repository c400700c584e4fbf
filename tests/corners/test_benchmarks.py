"The benchmarks that the tests can run: what waits for a GPU, as far as it goes without one"
import subprocess,sys
from harness import *
folder = Path(__file__).resolve().parents[2]/'benchmarks'

def test_without_a_gpu_it_says_what_it_would_do():
    cmd = [sys.executable, str(folder/'gpu.py'), '--dry']
    out = subprocess.run(cmd, capture_output=True, text=True, check=True).stdout
    for o in ('out_of_memory: ','exact: ','overlap: ','tables: ','-m pytest','wholebatch.py --save'): assert o in out

def test_the_weights_that_the_gpu_is_asked_for(monkeypatch):
    "On a CPU: the figure that must be tiny on a GPU, where copies run on side streams"
    monkeypatch.syspath_prepend(str(folder))
    import gpu
    monkeypatch.setattr(gpu, 'cuda', lambda: torch.device('cpu'))
    assert len(gpu.exact(bs=16, px=32))==3
