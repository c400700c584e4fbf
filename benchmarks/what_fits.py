"""What `learn.what_fits()` says for six learners, and what each of its lines then takes when it is pasted and run.

    python benchmarks/what_fits.py            # print the tables, about ten minutes on two cores
    python benchmarks/what_fits.py --save     # and write them to benchmarks/results/what_fits.json, which the docs show
    python benchmarks/what_fits.py --save --only tabular   # this learner again

The data is random and the weights are untrained, so nothing is downloaded. The budget is 85 % of what the learner takes as it is. `pasted` is the peak of two epochs
with the line, measured as `what_fits` measures: what a step allocates on top of the weights, with the gradients and the state of the optimizer.
"""
import argparse,io,random,warnings
from contextlib import redirect_stdout
from functools import partial
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.vision.all import *
from fastai.callback.progress import ProgressCallback
from fastai_accum.all import *
from fastai_accum.know import what_fits as ways
from fastai_accum.know.what_fits import as_text
from fastai_accum.devices import is_out_of_memory

ways.limit = math.inf   # a slow machine tries all ways, too

def loaders(data, bs, device): return DataLoaders.from_dsets(data, data, bs=bs, device=device)

def images(bs, px, device, masks=False):
    def y(): return torch.randint(10, (px,px) if masks else ())
    return loaders([(torch.randn(3,px,px), y()) for _ in range(2*bs)], bs, device)

def resnet(device, arch=resnet34, bs=16, px=96):
    return vision_learner(images(bs, px, device), arch, n_out=10, pretrained=False, normalize=False, loss_func=CrossEntropyLossFlat())

def unet(device, bs=4, px=64):
    dls = images(bs, px, device, masks=True)
    return unet_learner(dls, resnet34, n_out=10, pretrained=False, normalize=False, loss_func=CrossEntropyLossFlat(axis=1))

def text(device, bs=16):
    df = pd.DataFrame(dict(text=[' '.join(random.choices('abcdefgh', k=n)) for n in random.choices(range(20,141), k=3*bs)], label=random.choices('xy', k=3*bs)))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.1, bs=bs, device=device)
    return text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=dict(awd_lstm_clas_config, emb_sz=200, n_hid=400))

class Transformer(nn.Module):
    "Classifies sequences of tokens"
    def __init__(self, d, n, n_layer, heads):
        super().__init__()
        self.emb,self.pos = nn.Embedding(5000, d),nn.Parameter(torch.randn(n, d)*.02)
        layer = nn.TransformerEncoderLayer(d, heads, 4*d, batch_first=True)
        self.body,self.head = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False),nn.Linear(d, 10)
    def forward(self, x): return self.head(self.body(self.emb(x)+self.pos).mean(1))

def transformer(device, bs=16, n=128, d=128, n_layer=4, heads=4):
    data = [(torch.randint(5000, (n,)), torch.randint(10, ())) for _ in range(2*bs)]
    return Learner(loaders(data, bs, device), Transformer(d, n, n_layer, heads), loss_func=CrossEntropyLossFlat())

def tabular(device, bs=1024):
    n = 4*bs
    df = pd.DataFrame({**{f'x{i}':np.random.rand(n) for i in range(20)}, 'b':np.random.choice(list('xyz'), n), 'y':np.random.choice(['no','yes'], n)})
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['b'], cont_names=[f'x{i}' for i in range(20)], y_names='y', bs=bs, device=device)
    return tabular_learner(dls, layers=[400,200])

def info_nce(pred, y):
    "Samples `i` and `i+n/2` are partners (van den Oord et al., 2018, equation 4)"
    a,b = F.normalize(pred, dim=1).chunk(2)
    return F.cross_entropy(a@b.T/.1, torch.arange(len(a), device=a.device))

def contrastive(device, bs=64, px=32):
    convs = [ConvLayer(ni, 32, norm_type=None) for ni in (3,32,32)]
    return Learner(images(bs, px, device), nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16)), loss_func=info_nce)

nets = {'`vision_learner`, ResNet-34, 16 images of 96 pixels':resnet, '`unet_learner`, ResNet-34, 4 images of 64 pixels':unet,
        '`text_classifier_learner`, AWD-LSTM with 3 layers of 400, 16 texts':text, 'A transformer with 4 layers of 128, 16 sequences of 128 tokens':transformer,
        '`tabular_learner`, layers of 400 and 200, 1,024 rows':tabular,
        'A contrastive loss, 3 convolutions, 64 images of 32 pixels':contrastive}

def learner(make, device):
    set_seed(0)
    learn = make(device)
    learn.model.to(device)   # what counts comes on top of the weights
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

class Stop(Callback):
    "Ends the fit at the first prediction, after what is done once, such as a proof"
    order = -math.inf   # before callbacks that keep what the model returns
    def after_pred(self): raise CancelFitException

def pasted(make, device, line):
    "The peak of two epochs with `line`, or `None` if memory runs out"
    learn = learner(make, device)
    if line: exec(line, dict(learn=learn))
    try:
        with redirect_stdout(io.StringIO()):
            learn.fit(1, cbs=Stop())
            weights = sum(o.nbytes for o in (*learn.model.parameters(), *learn.model.buffers()))
            return weights+peak_bytes(partial(learn.fit, 2, cbs=NoValid()))   # in the second epoch, the optimizer has its state
    except Exception as e:
        if not is_out_of_memory(e): raise

def rows(make, device, budget=None):
    "The result of `what_fits`, as dictionaries; without a `budget`, it is 85 % of what the learner takes as it is"
    if budget is None: budget = int(.85*pasted(make, device, ''))
    fits = learner(make, device).what_fits(budget)
    shown = fits.table.rename(columns={'what changes':'stays'})[['time','stays']].to_dict('records')
    found = [dict(line=o.line, peak=o.peak, fits=o.fits, is_same=o.is_same, pasted=pasted(make, device, o.line), **t) for o,t in zip(fits.ways, shown)]
    return dict(title=fits.title, line=fits.line, note=fits.note, budget=budget, ways=found)

def error(w):
    "How far the peak of the pasted line is from what the table said"
    return abs(w['pasted']/w['peak']-1) if w['peak'] and w['pasted'] else None

def show(name, r):
    print(f"\n{name}\n\n{r['title']}\n")
    print(table([(w['line'] or '(as it is)', as_text(w['peak']) if w['peak'] else 'out of memory', as_text(w['pasted']) if w['pasted'] else 'out of memory',
                  f'{error(w):.1%}' if error(w) is not None else '', {True:'yes', False:'no'}[w['fits']], w['time'], w['stays']) for w in r['ways']],
                ['line','peak','pasted','apart','fits','time','what changes']))
    print(f"\n{r['note']}", flush=True)

def measure(nets, device, name, save_it, budget=None, only=()):
    "Print the table of each of `nets` whose name has one of the words `only`, and put them into results/`name`.json"
    far,file = 0,Path(__file__).parent/'results'/f'{name}.json'
    for net,make in nets.items():
        if only and not any(o in net for o in only): continue
        r = rows(make, device, budget)
        show(net, r)
        far = max(far, *(error(w) or 0 for w in r['ways']))
        if not save_it: continue
        was = json.loads(file.read_text(encoding='utf-8'))['rows'] if file.exists() else {}
        save(name, rows={k:r if k==net else was[k] for k in nets if k==net or k in was})
    print(f'\nThe pasted lines take what the tables say, within {far:.1%}')
    assert far<.05, far

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--save', action='store_true'); p.add_argument('--only', nargs='*', default=()); args = p.parse_args()
    print(machine())
    measure(nets, torch.device('cpu'), 'what_fits', args.save, only=args.only)
