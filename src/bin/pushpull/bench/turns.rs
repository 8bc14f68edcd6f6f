//! Who takes turns with whom, and for how long: ours and the ceiling, again and again.

use std::time::{Duration, Instant};

use super::Failure;

/// How often ours and the ceiling take turns, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) rounds: usize,
    /// The time that one side of a round takes, roughly.
    pub(crate) round: Duration,
}

/// The durations of operations, round by round.
pub(crate) type Rounds = Vec<Vec<Duration>>;

/// Does something once, and says how long it took.
pub(crate) type Operation<'a> = &'a mut dyn FnMut() -> Result<Duration, Failure>;

/// Ours, ceiling, ours, ceiling.
pub(crate) fn take_turns(
    pace: Pace,
    mut ours: impl FnMut() -> Result<Duration, Failure>,
    mut ceiling: impl FnMut() -> Result<Duration, Failure>,
) -> Result<(Rounds, Rounds), Failure> {
    let [ours, ceiling] = all_take_turns(pace, [&mut ours, &mut ceiling])?;
    Ok((ours, ceiling))
}

/// One after the other, again and again.
pub(crate) fn all_take_turns<const N: usize>(
    pace: Pace,
    mut operations: [Operation<'_>; N],
) -> Result<[Rounds; N], Failure> {
    // The first operations touch memory for the first time.
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

fn one_round(time: Duration, operation: Operation<'_>) -> Result<Vec<Duration>, Failure> {
    let start = Instant::now();
    let mut durations = Vec::new();
    while start.elapsed() < time || durations.len() < 3 {
        durations.push(operation()?);
    }
    Ok(durations)
}
