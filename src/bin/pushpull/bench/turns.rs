//! Interleaves the operations of pushpull and its ceilings, so that both see the same neighbours.

use std::time::{Duration, Instant};

use super::BenchError;

/// Number and length of the rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) rounds: usize,
    /// Approximate duration of one side of a round.
    pub(crate) round: Duration,
}

/// Durations of operations, round by round.
pub(crate) type Rounds = Vec<Vec<Duration>>;

/// Runs one operation and returns its duration.
pub(crate) type Operation<'a> = &'a mut dyn FnMut() -> Result<Duration, BenchError>;

/// Alternates between rounds of ours and of the ceiling.
pub(crate) fn interleave(
    pace: Pace,
    mut ours: impl FnMut() -> Result<Duration, BenchError>,
    mut ceiling: impl FnMut() -> Result<Duration, BenchError>,
) -> Result<(Rounds, Rounds), BenchError> {
    let [ours, ceiling] = interleave_all(pace, [&mut ours, &mut ceiling])?;
    Ok((ours, ceiling))
}

/// Runs one round of each operation in order, `pace.rounds` times.
pub(crate) fn interleave_all<const N: usize>(
    pace: Pace,
    mut operations: [Operation<'_>; N],
) -> Result<[Rounds; N], BenchError> {
    // Warm up: the first operations fault their memory in.
    for _ in 0..3 {
        for operation in &mut operations {
            operation()?;
        }
    }
    let mut all = [const { Vec::new() }; N];
    for _ in 0..pace.rounds {
        for (rounds, operation) in all.iter_mut().zip(&mut operations) {
            rounds.push(one_round(pace.round, operation)?);
        }
    }
    Ok(all)
}

fn one_round(time: Duration, operation: Operation<'_>) -> Result<Vec<Duration>, BenchError> {
    let start = Instant::now();
    let mut durations = Vec::new();
    while start.elapsed() < time || durations.len() < 3 {
        durations.push(operation()?);
    }
    Ok(durations)
}
