//! The judge: what the servers hold against what the workers have written down.

use pushpull::blocking::Reader;
use pushpull::{Error, Params};

use crate::history::{Entry, History};
use crate::setting::{
    CACHE, CACHED_ROWS, CHUNK, ROWS, SHARDS, Setting, TABLE, WIDTH, WORKERS, dense, id, ledger,
    row, rows, table,
};

/// What was found. The first three counts must be zero.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdict {
    /// Pushes that were acknowledged, and are not there.
    pub(crate) lost: u64,
    /// Pushes that are there more often than they were made.
    pub(crate) duplicated: u64,
    /// Variables, or pairs of them, of which only a part has changed.
    pub(crate) torn: u64,
    /// Rows that were pushed, and made room for others.
    pub(crate) evicted: u64,
    /// The first faults, by name.
    pub(crate) names: Vec<String>,
}

/// How many faults are named.
const NAMES_MAX: usize = 20;

impl Verdict {
    pub(crate) fn is_clean(&self) -> bool {
        (self.lost, self.duplicated, self.torn) == (0, 0, 0)
    }

    pub(crate) fn add(&mut self, other: Verdict) {
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.torn += other.torn;
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
    pub(crate) fn element(&mut self, value: f32, entry: Entry, name: impl Fn() -> String) {
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

/// Judges the values of a cluster in which nothing moves any more.
pub(crate) fn judge(
    setting: &Setting,
    params: &Params,
    reader: &mut Reader,
    histories: &[History],
) -> Result<Verdict, Error> {
    let mut verdict = Verdict::default();
    for shard in 0..SHARDS {
        let name = dense(shard);
        let pushes = f64::from(verdict.uniform(params.view(&name)?, &name));
        let mut entered = 0.0;
        for worker in 0..WORKERS {
            let history = &histories[worker as usize];
            // What each row must hold: a push enters the ledger and changes its row, or does neither.
            let mut made = [0.0_f32; ROWS as usize];
            let mut cached = (0, 0);
            for chunk in 0..setting.chunks {
                let name = ledger(worker, chunk, shard);
                let values = setting.entries(params, &name)?;
                let entries = &history.entries[(chunk * CHUNK) as usize..];
                for (element, (&value, &entry)) in values.iter().zip(entries).enumerate() {
                    verdict.element(value, entry, || format!("{name}[{element}]"));
                    entered += f64::from(value);
                    made[row(element as u64) as usize] += value;
                }
                let found = verdict.tables(reader, (worker, shard, chunk), &values)?;
                cached = (cached.0 + found.0, cached.1 + found.1);
            }
            verdict.cache(&table(CACHE, worker, shard), cached);
            let name = rows(worker, shard);
            let ids: Vec<u64> = (0..ROWS).collect();
            let mut table = [0.0_f32; (ROWS * WIDTH) as usize];
            reader.pull_rows(&name, &ids, &mut table)?;
            for ((id, values), made) in ids.iter().zip(table.chunks(WIDTH as usize)).zip(made) {
                if values.iter().any(|&value| value != made) {
                    verdict
                        .torn(format!("row {id} of {name} is {values:?}, the ledger has {made}"));
                }
            }
        }
        // A push is one update of both: what has one without the other was torn in between. In
        // synchronous mode the dense variable has the mean, one for each step; a part of a ledger
        // is in one push of a step only. The last step takes what there is when training is finished.
        let per_step = setting.gradients_per_step() as f64;
        let short = pushes * per_step - entered;
        if !(0.0..per_step).contains(&short) {
            verdict.torn(format!("{name} has {pushes} pushes, the ledgers beside it {entered}"));
        }
        // The first shard owns the global step.
        if shard == 0 && params.step() as f64 != pushes {
            verdict.torn(format!("the step is {} after {pushes} pushes", params.step()));
        }
    }
    Ok(verdict)
}
