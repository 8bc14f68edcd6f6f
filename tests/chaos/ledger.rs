//! The judge: what the servers hold against what the workers have written down.

use pushpull::blocking::Reader;
use pushpull::optimizer::{ApplyAt, Run};
use pushpull::{Adam, Error, Momentum, Optimizer, Params};

use crate::history::{Entry, History};
use crate::setting::{
    ADAM, ADAM_RATE, CACHE, CACHED_ROWS, CHUNK, MOMENTUM, MOMENTUM_RATE, QUARTER, ROWS, SHARDS,
    Setting, TABLE, WIDTH, WORKERS, dense, heavy_rows, id, ledger, row, rows, sums, table,
};

/// What was found. The first four counts must be zero.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdict {
    /// Pushes that were acknowledged, and are not there.
    pub(crate) lost: u64,
    /// Pushes that are there more often than they were made.
    pub(crate) duplicated: u64,
    /// Variables, or pairs of them, of which only a part has changed.
    pub(crate) torn: u64,
    /// Pushes that some shards have and others do not, and that are not of a worker that was killed before it
    /// was told of it, in asynchronous mode.
    pub(crate) half_applied: u64,
    /// Rows that were pushed, and made room for others.
    pub(crate) evicted: u64,
    /// The first faults, by name.
    pub(crate) names: Vec<String>,
}

/// How many faults are named.
const NAMES_MAX: usize = 20;

impl Verdict {
    pub(crate) fn is_clean(&self) -> bool {
        (self.lost, self.duplicated, self.torn, self.half_applied) == (0, 0, 0, 0)
    }

    pub(crate) fn add(&mut self, other: Verdict) {
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.torn += other.torn;
        self.half_applied += other.half_applied;
        self.evicted += other.evicted;
        other.names.into_iter().for_each(|name| self.name(name));
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

    /// One element of a ledger: every acknowledged push once, every other one at most once.
    fn element(&mut self, value: f32, entry: Entry, name: impl Fn() -> String) {
        if value.fract() != 0.0 || value < 0.0 {
            return self.torn(format!("{} is {value}", name()));
        }
        let value = value as u64;
        let (missing, surplus) =
            (entry.acknowledged.saturating_sub(value), value.saturating_sub(entry.invoked));
        if missing + surplus > 0 {
            self.lost += missing;
            self.duplicated += surplus;
            self.name(format!("{} is {value} after {entry:?}", name()));
        }
    }

    /// One element of a ledger, as all shards have it, since the last restore: on each every acknowledged
    /// push once, every other one at most once, and none that was refused. All have the same, unless
    /// it is of a worker that was killed, in asynchronous mode.
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
        }
    }

    /// The rows of a worker's tables on a shard for a part of its ledger: those of the one that grows
    /// hold what the ledger does; those of the one that has not room for all, too, or were evicted.
    /// Returns how many of these rows were pushed, and how many the latter has.
    fn tables(
        &mut self,
        reader: &mut Reader,
        (worker, shard, chunk): (u32, usize, u64),
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

    /// A row is evicted only where there is no room, and then one for each that comes.
    fn cache(&mut self, name: &str, (pushed, cached): (u64, u64)) {
        let expected = pushed.min(CACHED_ROWS);
        if cached != expected {
            self.torn(format!("{name} has {cached} of {pushed} rows, not {expected}"));
        }
        self.evicted += pushed.saturating_sub(cached);
    }

    /// A dense variable: all its elements are equal. Returns what they are.
    pub(crate) fn uniform(&mut self, values: &[f32], name: &str) -> f32 {
        let first = values.first().copied().unwrap_or_default();
        if let Some(other) = values.iter().position(|&value| value != first) {
            let (here, rest) = (values[other], values.len() - other);
            self.torn(format!("{name} is {first}, and {here} from {other} on ({rest} elements)"));
        }
        first
    }
}

/// What each element of the ledgers is on each shard, by worker.
pub(crate) type Found = Vec<Vec<[f32; SHARDS]>>;

/// Judges the values of a cluster in which nothing moves any more. With `floors`, a checkpoint has just
/// been restored: what was acknowledged before it was begun is there, and all else that was begun may be.
/// Returns also what there is in the ledgers.
pub(crate) fn judge(
    setting: &Setting,
    params: &Params,
    reader: &mut Reader,
    histories: &[History],
    floors: Option<&[Vec<Entry>]>,
) -> Result<(Verdict, Found), Error> {
    let mut verdict = Verdict::default();
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
            // What each row must hold: a push enters the ledger and changes its row, or does neither.
            let mut made = [0.0_f32; ROWS as usize];
            let mut cached = (0, 0);
            for chunk in 0..setting.chunks {
                let values = &found[(chunk * CHUNK) as usize..][..CHUNK as usize];
                let values: Vec<f32> = values.iter().map(|value| value[shard]).collect();
                for (element, &value) in values.iter().enumerate() {
                    entered += f64::from(value);
                    made[row(element as u64) as usize] += value;
                }
                let found = verdict.tables(reader, (worker, shard, chunk), &values)?;
                cached = (cached.0 + found.0, cached.1 + found.1);
            }
            verdict.cache(&table(CACHE, worker, shard), cached);
            let ids: Vec<u64> = (0..ROWS).collect();
            verdict.rows(reader, &rows(worker, shard), &ids, &made)?;
            // The quarters that lie on this shard.
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
        // A push is one update of both: what has one without the other was torn in between. In
        // synchronous mode the dense variable has the mean, one for each step; a part of a ledger
        // is in one push of a step only. The last step takes what there is when training is finished.
        let per_step = setting.gradients_per_step() as f64;
        let short = pushes * per_step - entered;
        if !(0.0..per_step).contains(&short) {
            let name = dense(shard);
            verdict.torn(format!("{name} has {pushes} pushes, the ledgers beside it {entered}"));
        }
        // The first shard owns the global step.
        if shard == 0 && params.step() as f64 != pushes {
            verdict.torn(format!("the step is {} after {pushes} pushes", params.step()));
        }
    }
    Ok((verdict, found))
}

impl Verdict {
    /// Rows of a sparse variable, all of whose elements must be these.
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

/// What an element comes to that starts at zero and is pushed minus one so many times.
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
