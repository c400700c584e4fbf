"What the benchmarks share: the machine, exact peak memory, paired timing, and results as a table and a file"
import gc,json,os,platform,statistics,sys,time
from pathlib import Path
os.environ.setdefault('KINETO_LOG_LEVEL', '5')   # the profiler would report the missing GPU as an error
import torch
from fastai.callback.core import Callback,CancelValidException
from fastai.torch_core import default_device
from fastai_accum.devices import api

class NoValid(Callback):
    "Train only"
    def before_validate(self): raise CancelValidException

def keep_memory():
    """Start the script again with a C library that keeps freed memory for itself, as PyTorch does on a GPU. Otherwise it returns large blocks to the system, and
    getting them back can take as long as the training."""
    if os.environ.get('MALLOC_MMAP_MAX_')!='0':
        os.execve(sys.executable, [sys.executable,*sys.argv], {**os.environ, 'MALLOC_MMAP_MAX_':'0', 'MALLOC_TRIM_THRESHOLD_':str(10**11)})

def name_of(device):
    "What `device` calls itself"
    if device.type=='cpu': return 'no GPU'
    return getattr(api(device), 'get_device_name', lambda _: device.type.upper())(device)

def machine():
    "One line about what the figures were measured on"
    info = Path('/proc/cpuinfo')
    lines = info.read_text(encoding='utf-8').splitlines() if info.exists() else []
    cpu = next((l.split(':')[1].strip() for l in lines if l.startswith('model name')), platform.processor())
    import fastai
    return f'{cpu}, {os.cpu_count()} cores, {name_of(default_device())}; Python {platform.python_version()}, torch {torch.__version__}, fastai {fastai.__version__}'

def peak_bytes(f, device=None):
    "The peak of the bytes that `f` allocates on `device`, where fastai puts learners by default, on top of what was there before"
    from fastai_accum.know.what_fits import peak_bytes
    return peak_bytes(f, device or default_device())

def held_bytes(learn):
    "Two numbers of bytes: of the parameters and buffers, and of the gradients and the state of the optimizer"
    n = lambda ts: sum(t.numel()*t.element_size() for t in ts if torch.is_tensor(t))
    ps = list(learn.model.parameters())
    state = [v for pg in learn.opt.param_lists for p in pg for v in learn.opt.state[p].values()]
    return n([*ps, *learn.model.buffers()]),n([*(p.grad for p in ps), *state])

def paired(a, b, n=20):
    "Run `a` and `b` in turn, `n` times, and return the `middle` of the ratios `a`/`b`"
    rs = []
    for i in range(n):
        ts = {}
        for f in ((a,b) if i%2 else (b,a)): ts[f] = f()
        rs.append(ts[a]/ts[b])
    return middle(rs)

def middle(rs):
    "The median of `rs`, and half the width of its 95 % interval (order statistics)"
    rs,n = sorted(rs),len(rs)
    k = max(int(n/2-0.98*n**.5), 0)
    return statistics.median(rs),(rs[n-1-k]-rs[k])/2

def clock(f):
    "Seconds that `f` takes"
    gc.collect(); gc.disable()
    try:
        t = time.perf_counter(); f()
        if torch.accelerator.is_available(): torch.accelerator.synchronize()
        return time.perf_counter()-t
    finally: gc.enable()

def table(rows, cols):
    "Print `rows` as a Markdown table, aligned"
    rows = [[str(o) for o in r] for r in rows]
    ws = [max(len(r[i]) for r in [cols]+rows) for i in range(len(cols))]
    line = lambda r: '| ' + ' | '.join(o.ljust(w) for o,w in zip(r,ws)) + ' |'
    return '\n'.join([line(cols), line(['-'*w for w in ws]), *map(line, rows)])

def save(name, **kwargs):
    "Write the figures beside the script"
    p = Path(__file__).parent/'results'/f'{name}.json'
    p.parent.mkdir(exist_ok=True)
    p.write_text(json.dumps({'machine':machine(), **kwargs}, indent=1)+'\n', encoding='utf-8')
    return p

def mnist(folder=None):
    "The 10,000 images of MNIST's test set as 28 × 28 floats from 0 to 1, shuffled, and their digits"
    import gzip,numpy as np
    if folder is None:
        from fastai.data.external import untar_data,URLs
        from PIL import Image
        files = sorted((untar_data(URLs.MNIST)/'testing').glob('*/*.png'))
        x,y = np.stack([np.array(Image.open(f)) for f in files]),np.array([int(f.parent.name) for f in files])
    else:
        read = lambda nm, skip: np.frombuffer(gzip.decompress((folder/f't10k-{nm}-ubyte.gz').read_bytes()), dtype=np.uint8, offset=skip)
        x,y = read('images-idx3', 16).reshape(-1,28,28),read('labels-idx1', 8)
    order = np.random.RandomState(0).permutation(len(x))
    return torch.tensor(x[order]).float()/255,torch.tensor(y[order].astype(int))

def cifar(folder=None):
    """Images of CIFAR-10 as 3 × 32 × 32 floats around 0, and their classes: of each class 1,000 to train on and 200 to test. `folder` holds `train` and
    `test`, each with a folder for each class."""
    import numpy as np
    from PIL import Image
    if folder is None:
        from fastai.data.external import untar_data,URLs
        folder = untar_data(URLs.CIFAR)
    def read(part, n):
        files = [(f,i) for i,c in enumerate(sorted(o for o in (folder/part).iterdir() if o.is_dir())) for f in sorted(c.iterdir())[:n]]
        if not files: raise FileNotFoundError(f'no images in {folder/part}: give the folder that holds train/CLASS and test/CLASS')
        x = torch.tensor(np.stack([np.array(Image.open(f)) for f,_ in files])).permute(0,3,1,2).float()/255
        return (x-.47)/.25,torch.tensor([i for _,i in files])
    return read('train', 1000),read('test', 200)
