"A hundred thousand micro-batches: no memory that stays, no time that grows"
import gc,os,pytest,statistics,time
from harness import *

def rss():
    "Resident memory of this process in MiB"
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20

class Watch(EachMicro):
    "Memory, and the time of a micro-batch, each thousand micro-batches"
    order = Recorder.order-1
    def before_fit(self): self.n,self.mem,self.secs,self.block = 0,[],[],[]
    def before_batch(self): self.start = time.perf_counter()
    def after_batch(self):
        if not self.training: return
        self.n += 1
        self.block.append(time.perf_counter()-self.start)
        if self.n%1000: return
        self.mem.append(rss()); self.secs.append(statistics.median(self.block))
        self.block.clear()

@pytest.mark.skipif(not Path('/proc/self/statm').exists(),
                    reason='reads the memory of the process from /proc, which only Linux has')
@pytest.mark.parametrize('n_epoch,kw', [(100, dict(n_step=4)), (20, dict(n_samples=30)),
                                        (20, dict(n_step=7, drop_last=True))], ids=str)
def test_soak(n_epoch, kw):
    "Without `Recorder`, whose lists grow by one a step"
    watch = Watch()
    learn = make_learner(make_dls(1000*8-3, 8, skip=(5,77)), cbs=[watch,AccumulateStep(**kw)])
    learn.remove_cbs([Spy,Recorder])
    learn.fit(n_epoch)
    first,last = (statistics.median(o) for o in (watch.secs[:10], watch.secs[-10:]))
    grown = watch.mem[-1]-watch.mem[0]
    print(f'{kw}: {watch.n} micro-batches; {grown:+.2f} MiB from the first 1,000 to the end; '
          f'time of a micro-batch × {last/first:.3f}')
    # a busy machine slows it down a little, a list that is gone through would a hundredfold
    assert watch.n>=n_epoch*990 and grown<1 and last/first<1.25
    n = learn.accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown
