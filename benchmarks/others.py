"""Train the same model on the same texts with Accelerate, Lightning and the Hugging Face Trainer, each as its documentation says, and with fastai_accum.
How far is each gradient from that of the large batch?

    python benchmarks/others.py           # print the tables, a minute on two cores
    python benchmarks/others.py --save    # and write the figures to benchmarks/results/others.json, which the docs show

Accelerate comes with the development requirements, transformers and lightning with `pip install -e '.[integrations,bench]'`."""
import argparse,importlib.metadata,logging,tempfile,warnings
from common import *
warnings.filterwarnings('ignore')
os.environ.update(CUDA_VISIBLE_DEVICES='', TOKENIZERS_PARALLELISM='false', HF_HUB_OFFLINE='1')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai_accum.core import AccumulateStep
from transformers import GPT2Config,GPT2LMHeadModel,Trainer,TrainingArguments
from accelerate import Accelerator
import lightning

N_STEP,BS,VOCAB = 4,4,50
for name in 'lightning.pytorch','transformers': logging.getLogger(name).setLevel(logging.ERROR)

def texts(n, uneven):
    "`n` micro-batches of texts of 16 tokens. If `uneven`, some texts are shorter, and the labels of their padding are -100"
    g = torch.Generator().manual_seed(0)
    res = []
    for i in range(n):
        ids = torch.randint(VOCAB, (BS,16), generator=g)
        lens = torch.randint(3, 17, (BS,), generator=g) if uneven else torch.full((BS,), 16)
        res.append(dict(input_ids=ids, labels=torch.where(torch.arange(16)<lens[:,None], ids, -100)))
    return res

cases = {'equal texts':texts(8, False), 'a tail of two':texts(6, False), 'unequal texts':texts(8, True)}

def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)).double()

def loss_of(logits, labels, reduction='mean'):
    "The loss of causal language models, in the precision of the logits; that of transformers computes in float32"
    return F.cross_entropy(logits[:,:-1].flatten(0,1), labels[:,1:].flatten(), reduction=reduction)
def run(m, b): return m(input_ids=b['input_ids']).logits

class Noting(torch.optim.SGD):
    "An optimizer that notes the gradients and the time at each step, and does not move the weights"
    def __init__(self, params, lr=0., **kwargs): super().__init__(params, lr=0.); self.seen,self.times = [],[]
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad(): closure()
        self.seen.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g['params']]))
        self.times.append(time.perf_counter())

def large(batches):
    "The gradients of the large batches"
    m,res = model(),[]
    for w in chunked(batches, N_STEP):
        m.zero_grad()
        b = {k:torch.cat([o[k] for o in w]) for k in w[0]}
        loss_of(run(m, b), b['labels']).backward()
        res.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
    return res

def by_hand(batches):
    "A plain loop, as most tutorials show it"
    m = model()
    note = Noting(m.parameters())
    for i,b in enumerate(batches):
        (loss_of(run(m, b), b['labels'])/N_STEP).backward()
        if (i+1)%N_STEP==0 or i+1==len(batches): note.step(); note.zero_grad()
    return note

def plain(batches, cbs=None):
    "Plain fastai, which steps at each micro-batch: its time of four micro-batches is what a `Learner` takes without accumulation"
    class Logits(nn.Module):
        def __init__(self): super().__init__(); self.m = model()
        def forward(self, x): return self.m(x).logits[:,:-1].transpose(1,2)
    bs = [(b['input_ids'],b['labels'][:,1:]) for b in batches]
    dls = DataLoaders(DataLoader(bs, bs=None), DataLoader(bs[:1], bs=None))
    learn = Learner(dls, Logits(), loss_func=nn.CrossEntropyLoss(), opt_func=lambda ps, **kw: OptimWrapper(ps, Noting), default_cbs=False, cbs=[TrainEvalCallback, NoValid(), *L(cbs)])
    learn.fit(1)
    return learn.opt.opt

def here(batches):
    "`AccumulateStep(n_step)`"
    return plain(batches, AccumulateStep(N_STEP))

def accelerate(batches):
    "`accumulate()`: the guide 'Performing gradient accumulation'"
    acc,m = Accelerator(gradient_accumulation_steps=N_STEP, cpu=True),model()
    note = Noting(m.parameters())
    m,opt,dl = acc.prepare(m, note, torch.utils.data.DataLoader(batches, batch_size=None))
    for b in dl:
        with acc.accumulate(m):
            acc.backward(loss_of(run(m, b), b['labels']))
            opt.step(); opt.zero_grad()
    return note

def accelerate_counted(batches):
    "The same guide, 'Gradient accumulation on training samples of variable size'"
    acc,m = Accelerator(gradient_accumulation_steps=N_STEP, cpu=True),model()
    note = Noting(m.parameters())
    m,opt,dl = acc.prepare(m, note, torch.utils.data.DataLoader(batches, batch_size=None))
    it = iter(dl)
    for w in chunked(it, N_STEP):
        n = sum((b['labels'][:,1:]!=-100).sum() for b in w)
        for b in w:
            acc.backward(loss_of(run(m, b), b['labels'], reduction='sum')*N_STEP/n)
        opt.step(); opt.zero_grad()
    return note

def lightnings(batches):
    "`accumulate_grad_batches`"
    class Module(lightning.LightningModule):
        def __init__(self): super().__init__(); self.m = model()
        def training_step(self, b, i): return loss_of(run(self.m, b), b['labels'])
        def configure_optimizers(self): self.note = Noting(self.m.parameters()); return self.note
    m = Module()
    trainer = lightning.Trainer(accumulate_grad_batches=N_STEP, max_epochs=1, accelerator='cpu', devices=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=None)
    trainer.fit(m, torch.utils.data.DataLoader(batches, batch_size=None))
    return m.note

def trainer(batches, **kwargs):
    "`gradient_accumulation_steps`, with the loss that transformers has for the model"
    class Ordered(Trainer):
        "Keep the order of the texts, which the Trainer would shuffle"
        def _get_train_sampler(self, *args): return torch.utils.data.SequentialSampler(self.train_dataset)
        def log(self, *args, **kwargs): pass
    m = model()
    note = Noting(m.parameters())
    items = [{k:b[k][i] for k in b} for b in batches for i in range(BS)]
    with tempfile.TemporaryDirectory() as d:
        args = TrainingArguments(d, per_device_train_batch_size=BS, gradient_accumulation_steps=N_STEP, num_train_epochs=1, max_grad_norm=0, report_to=[], use_cpu=True,
                                 save_strategy='no', logging_strategy='no', disable_tqdm=True)
        Ordered(m, args, train_dataset=items, optimizers=(note, torch.optim.lr_scheduler.LambdaLR(note, lambda i: 1.)), **kwargs).train()
    return note

def trainer_own_loss(batches):
    "The same with `compute_loss_func`, which gets the number of items in the window"
    def loss(out, labels, num_items_in_batch=None): return loss_of(out.logits, labels, reduction='sum')/num_items_in_batch
    return trainer(batches, compute_loss_func=loss)

systems = {'AccumulateStep':here, 'plain fastai':plain, 'a loop by hand':by_hand, 'Accelerate, accumulate':accelerate, 'Accelerate, counting tokens':accelerate_counted, 'Lightning, accumulate_grad_batches':lightnings,
           'Trainer':trainer, 'Trainer, compute_loss_func':trainer_own_loss}

def error(note, ref):
    "The largest relative error of a gradient over all steps, or None if the number of steps is not that of the large batch"
    return None if len(note.seen)!=len(ref) else max(((a-b).norm()/b.norm()).item() for a,b in zip(note.seen, ref))

def per_window(f, batches):
    "Median of the seconds from the end of one window to the end of the next"
    times = f(batches).times
    return statistics.median(np.diff(times[::len(times)*N_STEP//len(batches)]))   # plain fastai has several steps in a window

def figure(e): return '' if e is None else f'{e:.0e}' if e<1e-3 else f'{e:.2f}'

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--rounds', type=int, default=15); p.add_argument('--save', action='store_true'); args = p.parse_args()
    versions = {k:importlib.metadata.version(k) for k in ('accelerate','lightning','transformers')}
    print(f"{machine()}, {', '.join(f'{k} {v}' for k,v in versions.items())}\n")
    refs = [large(bs) for bs in cases.values()]
    errors = {name:[error(f(bs), ref) for bs,ref in zip(cases.values(), refs)] for name,f in systems.items()}
    many,ratios = texts(80, False),{name:[] for name in systems}
    for i in range(args.rounds):
        names = list(systems)[::1 if i%2 else -1]
        secs = {name:per_window(systems[name], many) for name in names}
        for name in names: ratios[name].append(secs[name]/secs['a loop by hand'])
    rows = [(name, *errors[name], *middle(ratios[name])) for name in systems]
    cols = ['', *(f'error: {c}' for c in cases), 'time of a window, a loop by hand = 1']
    print(table([(n, *map(figure, es), f'{t:.2f} ± {pm:.2f}') for n,*es,t,pm in rows], cols))
    if args.save: save('others', versions=versions, n_step=N_STEP, rounds=args.rounds, cols=cols, rows=rows)
