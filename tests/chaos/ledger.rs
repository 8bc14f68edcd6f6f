//! The judge: compares the values on the servers with the histories of the workers.

use pushpull::blocking::Reader;
use pushpull::optim::{ApplyAt, Run};
use pushpull::optim::{Momentum, Optimizer};
use pushpull::{Adam, Error, Params};

use crate::history::{Entry, History};
use crate::setting::{
    ADAM, ADAM_RATE, CACHE, CACHED_ROWS, CHUNK, ChaosSetting, MOMENTUM, MOMENTUM_RATE, QUARTER,
    ROWS, SHARDS, TABLE, WIDTH, WORKERS, dense, heavy_rows, id, ledger, row, rows, sums, table,
};

/// The result of a judgement. The first four counts must be zero.
#[derive(Clone, Debug, Default)]
pub(crate) struct LedgerVerdict {
    /// Acknowledged pushes that are missing.
    pub(crate) lost: u64,
    /// Pushes that were applied more often than they were made.
    pub(crate) duplicated: u64,
    /// Variables, or pairs of variables, of which only a part has changed.
    pub(crate) torn: u64,
    /// Pushes that only some of the shards have applied. In asynchronous mode a push whose worker
    /// was killed before it received the outcome does not count.
    pub(crate) half_applied: u64,
    /// Such pushes of killed workers, in asynchronous mode, in one judgement. The step owner must
    /// know of them.
    partly_applied: u64,
    /// Rows that were pushed and then evicted for others.
    pub(crate) evicted: u64,
    /// Descriptions of the first faults.
    pub(crate) names: Vec<String>,
}

/// How many faults are described.
const NAMES_MAX: usize = 20;

impl LedgerVerdict {
    pub(crate) fn is_clean(&self) -> bool {
        (self.lost, self.duplicated, self.torn, self.half_applied) == (0, 0, 0, 0)
    }

    pub(crate) fn add(&mut self, other: LedgerVerdict) {
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.torn += other.torn;
        self.half_applied += other.half_applied;
        self.evicted += other.evicted;
        other.names.into_iter().for_each(|name| self.name(name));
    }

    /// Judges the number of partly applied gradients by which the step owner refuses final values.
    pub(crate) fn told(&mut self, counted: u64) {
        let found = self.partly_applied;
        if found > counted {
            self.half_applied += found - counted;
            self.name(format!(
                "{found} pushes are on some shards only, the step owner knows {counted}"
            ));
        }
    }

    fn name(&mut self, name: String) {
        if self.names.len() < NAMES_MAX {
            self.names.push(name);
        }
    }

    fn torn(&mut self, name: String) {
        self.torn += 1;
        self.name(name);
    }

    /// Judges one element of a ledger: it has every acknowledged push once and others at most once.
    fn element(&mut self, value: f32, entry: Entry, name: impl Fn() -> String) {
        if value.fract() != 0.0 || value < 0.0 {
            return self.torn(format!("{} is {value}", name()));
        }
        let value = value as u64;
        let missing = entry.acknowledged.saturating_sub(value);
        let surplus = value.saturating_sub(entry.invoked);
        if missing + surplus > 0 {
            self.lost += missing;
            self.duplicated += surplus;
            self.name(format!("{} is {value} after {entry:?}", name()));
        }
    }

    /// Judges one element of a ledger on all shards, since the last restore.
    ///
    /// Each shard must have every acknowledged push once, every other push at most once, and no
    /// refused push. All shards must have the same pushes. The exception, in asynchronous mode, is
    /// a push without an outcome, whose worker was killed.
    pub(crate) fn everywhere(
        &mut self,
        values: [f32; SHARDS],
        entry: Entry,
        synchronous: bool,
        name: impl Fn() -> String,
    ) {
        let same = values.iter().all(|&value| value == values[0]);
        let bounds = entry.acknowledged as f32..=entry.invoked as f32;
        if same {
            return self.element(values[0], entry, name);
        }
        if synchronous || values.iter().any(|value| !bounds.contains(value)) {
            self.half_applied += 1;
            self.name(format!("{} is {values:?} on the shards after {entry:?}", name()));
        } else {
            self.partly_applied += 1;
        }
    }

    /// Judges the rows of a worker's tables on a shard for one part of its ledger.
    ///
    /// Rows of the growing table must equal the ledger. Rows of the bounded table must equal the
    /// ledger or be evicted. Returns how many of these rows were pushed, and how many the bounded
    /// table has.
    fn tables(
        &mut self,
        reader: &mut Reader,
        worker: u32,
        shard: usize,
        chunk: u64,
        ledger: &[f32],
    ) -> Result<(u64, u64), Error> {
        let ids: Vec<u64> = (chunk * CHUNK..(chunk + 1) * CHUNK).map(id).collect();
        let mut found = vec![0.0_f32; (CHUNK * WIDTH) as usize];
        let mut cached = 0;
        for kind in [TABLE, CACHE] {
            let name = table(kind, worker, shard);
            reader.pull_rows(&name, &ids, &mut found)?;
            for ((id, row), &entry) in ids.iter().zip(found.chunks(WIDTH as usize)).zip(ledger) {
                let is_there = row.iter().any(|&value| value != 0.0);
                cached += u64::from(kind == CACHE && is_there);
                if (is_there || kind == TABLE) && row.iter().any(|&value| value != entry) {
                    self.torn(format!("row {id} of {name} is {row:?}, the ledger has {entry}"));
                }
            }
        }
        Ok((ledger.iter().filter(|&&entry| entry != 0.0).count() as u64, cached))
    }

    /// Judges the number of rows in a bounded table: all that were pushed, up to its capacity.
    fn cache(&mut self, name: &str, pushed: u64, cached: u64) {
        let expected = pushed.min(CACHED_ROWS);
        if cached != expected {
            self.torn(format!("{name} has {cached} of {pushed} rows, not {expected}"));
        }
        self.evicted += pushed.saturating_sub(cached);
    }

    /// Judges a dense variable, all of whose elements must be equal. Returns the first element.
    pub(crate) fn uniform(&mut self, values: &[f32], name: &str) -> f32 {
        let first = values.first().copied().unwrap_or_default();
        if let Some(other) = values.iter().position(|&value| value != first) {
            let here = values[other];
            let rest = values.len() - other;
            self.torn(format!("{name} is {first}, and {here} from {other} on ({rest} elements)"));
        }
        first
    }
}

/// By worker: each element of the ledger on each shard.
pub(crate) type Found = Vec<Vec<[f32; SHARDS]>>;

/// Judges the values of a cluster at rest, and also returns the ledgers.
///
/// `floors` is set just after a restore: entries from before the checkpoint was begun. The
/// checkpoint must have every push that they count as acknowledged, and may have any other push.
pub(crate) fn judge(
    setting: &ChaosSetting,
    params: &Params,
    reader: &mut Reader,
    histories: &[History],
    floors: Option<&[Vec<Entry>]>,
) -> Result<(LedgerVerdict, Found), Error> {
    let mut verdict = LedgerVerdict::default();
    let mut found = vec![vec![[0.0; SHARDS]; setting.ledger_elements() as usize]; WORKERS as usize];
    for worker in 0..WORKERS {
        let found = &mut found[worker as usize];
        for (chunk, shard) in (0..setting.chunks).flat_map(|c| (0..SHARDS).map(move |s| (c, s))) {
            let values = setting.entries(params, &ledger(worker, chunk, shard))?;
            let found = &mut found[(chunk * CHUNK) as usize..];
            found.iter_mut().zip(values).for_each(|(found, value)| found[shard] = value);
        }
        let history = &histories[worker as usize];
        let of_history = history.entries.iter().zip(&history.base);
        for (element, (found, (&entry, base))) in found.iter().zip(of_history).enumerate() {
            let mut entry = entry;
            if let Some(floors) = floors {
                entry.acknowledged = floors[worker as usize][element].acknowledged;
            }
            let values = std::array::from_fn(|shard| found[shard] - base[shard]);
            let name = || format!("ledger/{worker}[{element}], since {base:?},");
            verdict.everywhere(values, entry, setting.synchronous, name);
        }
    }
    for shard in 0..SHARDS {
        let name = dense(shard);
        let pushes = f64::from(verdict.uniform(params.view(&name)?, &name));
        let mut entered = 0.0;
        for worker in 0..WORKERS {
            let found = &found[worker as usize];
            // The expected rows: a push changes both the ledger and its row, or neither.
            let mut made = [0.0_f32; ROWS as usize];
            let mut pushed = 0;
            let mut cached = 0;
            for chunk in 0..setting.chunks {
                let values = &found[(chunk * CHUNK) as usize..][..CHUNK as usize];
                let values: Vec<f32> = values.iter().map(|value| value[shard]).collect();
                for (element, &value) in values.iter().enumerate() {
                    entered += f64::from(value);
                    made[row(element as u64) as usize] += value;
                }
                let found = verdict.tables(reader, worker, shard, chunk, &values)?;
                pushed += found.0;
                cached += found.1;
            }
            verdict.cache(&table(CACHE, worker, shard), pushed, cached);
            let ids: Vec<u64> = (0..ROWS).collect();
            verdict.rows(reader, &rows(worker, shard), &ids, &made)?;
            // The quarter on this shard.
            let quarter = shard as u64 * ROWS..(shard as u64 + 1) * ROWS;
            let name = heavy_rows(worker);
            let with_momentum = made.map(|pushes| after(&momentum(), pushes as u64));
            verdict.rows(reader, &name, &quarter.clone().collect::<Vec<_>>(), &with_momentum)?;
            let name = sums(worker);
            let values = &params.view::<f32>(&name)?[quarter.start as usize..quarter.end as usize];
            if values != made {
                verdict.torn(format!("{name} is {values:?} on {shard}, the ledger has {made:?}"));
            }
        }
        let adam = &params.view::<f32>(ADAM)?[shard * QUARTER as usize..][..QUARTER as usize];
        let value = verdict.uniform(adam, ADAM);
        let expected = after(&Adam::new(ADAM_RATE), pushes as u64);
        if value != expected {
            verdict.torn(format!("{ADAM} is {value} on {shard}, {pushes} pushes make {expected}"));
        }
        // A push updates the dense variable and the ledgers in one commit. In synchronous mode the
        // dense variable has the mean, so it counts steps, while each ledger element is in only one
        // push of a step. The last step may take fewer gradients, when training is finished.
        let per_step = setting.gradients_per_step() as f64;
        let short = pushes * per_step - entered;
        if !(0.0..per_step).contains(&short) {
            let name = dense(shard);
            verdict.torn(format!("{name} has {pushes} pushes, the ledgers beside it {entered}"));
        }
        // The first shard is the step owner.
        if shard == 0 && params.step() as f64 != pushes {
            verdict.torn(format!("the step is {} after {pushes} pushes", params.step()));
        }
    }
    Ok((verdict, found))
}

impl LedgerVerdict {
    /// Judges rows of a sparse variable. All elements of a row must equal the expected value.
    fn rows(
        &mut self,
        reader: &mut Reader,
        name: &str,
        ids: &[u64],
        expected: &[f32],
    ) -> Result<(), Error> {
        let mut found = vec![0.0_f32; ids.len() * WIDTH as usize];
        reader.pull_rows(name, ids, &mut found)?;
        for ((id, values), expected) in ids.iter().zip(found.chunks(WIDTH as usize)).zip(expected) {
            if values.iter().any(|value| value != expected) {
                self.torn(format!("row {id} of {name} is {values:?}, the ledger makes {expected}"));
            }
        }
        Ok(())
    }
}

fn momentum() -> Momentum {
    Momentum::new(MOMENTUM_RATE, MOMENTUM)
}

/// Computes the value of an element that starts at zero after `pushes` gradients of minus one.
fn after(rule: &dyn Optimizer, pushes: u64) -> f32 {
    let mut value = [0.0_f32];
    let mut slots: Vec<[f32; 1]> = rule.slots().iter().map(|slot| [slot.initial as f32]).collect();
    for count in 1..=pushes {
        let mut slots: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
        let run = Run { values: &mut value, slots: &mut slots, gradient: &[-1.0] };
        rule.apply_f32(ApplyAt::new(count, count - 1), run);
    }
    value[0]
}
