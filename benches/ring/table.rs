//! [`Table`]: the best turn of each contender.

use std::collections::BTreeMap;
use std::fmt;

use crate::contender::Times;

/// The best times of contenders in rings of one size.
pub(crate) struct Table {
    ranks: u32,
    /// The contenders in order of their first turn.
    names: Vec<&'static str>,
    /// The best median and minimum, by size and contender.
    best: BTreeMap<(usize, &'static str), (f64, f64)>,
}

impl Table {
    /// Creates an empty table.
    pub(crate) fn new(ranks: u32) -> Table {
        Table { ranks, names: Vec::new(), best: BTreeMap::new() }
    }

    /// Adds a turn.
    pub(crate) fn add(&mut self, name: &'static str, turn: Vec<Times>) {
        if !self.names.contains(&name) {
            self.names.push(name);
        }
        for Times { kib, median, minimum } in turn {
            let best = self.best.entry((kib, name)).or_insert((median, minimum));
            *best = (best.0.min(median), best.1.min(minimum));
        }
    }

    /// Returns the rows of the ring that a contender is compared with: those of its medium.
    fn ring_of(name: &str) -> &'static str {
        match name {
            "bare unix" => "ring unix",
            "Open MPI shm" => "ring shm",
            _ => "ring tcp",
        }
    }
}

/// Writes a row for each size and contender: median and minimum in microseconds, and the time of the
/// ring over the same medium in units of the contender's.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ranks", self.ranks)?;
        writeln!(
            f,
            "{:>7} {:14} {:>11} {:>11} {:>11} {:>11}",
            "KiB", "", "median us", "minimum us", "ring/median", "ring/min"
        )?;
        let mut last = None;
        for &(kib, _) in self.best.keys() {
            if last.replace(kib) == Some(kib) {
                continue;
            }
            for name in &self.names {
                let Some(&(median, minimum)) = self.best.get(&(kib, *name)) else { continue };
                write!(f, "{kib:7} {name:14} {median:11.1} {minimum:11.1}")?;
                match self.best.get(&(kib, Table::ring_of(name))) {
                    Some((ours, least)) if !name.starts_with("ring") => {
                        writeln!(f, " {:11.2} {:11.2}", ours / median, least / minimum)?;
                    }
                    _ => writeln!(f)?,
                }
            }
        }
        Ok(())
    }
}
