//! [`CallDigests`]: the check that a coordinator schedules the calls that the servers know.

use pushpull_worker::RecordedDigests;

use crate::call::Call;
use crate::error::ServiceError;

/// The digests of the calls of a coordinator, in the order of their numbers.
#[derive(Debug)]
pub(crate) struct CallDigests {
    name: String,
    recorded: RecordedDigests,
    /// The last call, and the digest of it and all before it; 0 if that is unknown.
    last: (u64, u64),
}

impl CallDigests {
    /// Creates the digests of a coordinator from its name and the digests that the servers have
    /// recorded.
    pub(crate) fn new(name: &str, recorded: RecordedDigests) -> CallDigests {
        CallDigests { name: name.to_owned(), recorded, last: (0, 0) }
    }

    /// Returns the digest of the next call, which has this number. It is 0 if earlier calls were
    /// left out and the servers do not know their digest.
    ///
    /// # Errors
    /// [`ServiceError::CallsDiffer`] if the servers know another digest.
    pub(crate) fn next(&mut self, number: u64, call: &Call) -> Result<u64, ServiceError> {
        let before = match self.last {
            (last, digest) if last + 1 == number => digest,
            _ if self.recorded.number.0 + 1 == number => self.recorded.digest,
            _ => 0,
        };
        let is_known = number == 1 || before != 0;
        let digest = if is_known { call.digest(before) } else { 0 };
        self.last = (number, digest);
        match self.recorded.expected(number) {
            Some((shard, recorded)) if is_known && recorded != digest => {
                Err(ServiceError::CallsDiffer {
                    name: self.name.clone(),
                    number,
                    function: call.function.clone(),
                    digest,
                    shard,
                    recorded,
                })
            }
            _ => Ok(digest),
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::ShardId;
    use pushpull_worker::simulation::recorded_digests;

    use super::*;

    fn call(batch: i64) -> Call {
        Call::new("train").feed("batch", batch)
    }

    fn digests(first: u64, number: u64, digest: u64) -> CallDigests {
        let first = (first != 0).then_some(first);
        let recorded = recorded_digests(ShardId::default(), first, (number, digest));
        CallDigests::new("trainer", recorded)
    }

    /// Returns the digests of calls 1 to `last`.
    fn of_calls(last: u64) -> Vec<u64> {
        let mut fresh = digests(0, 0, 0);
        (1..=last).map(|number| fresh.next(number, &call(number as i64)).unwrap()).collect()
    }

    #[test]
    fn the_same_calls_have_the_same_digests() {
        let known = of_calls(5);
        let mut resumed = digests(known[0], 3, known[2]);
        let again = (1..=5).map(|n| resumed.next(n, &call(n as i64)).unwrap());
        assert_eq!(again.collect::<Vec<_>>(), known);
        // Where they run, and for how long, is no part of them.
        let moved = call(1).on("/job:worker/task:1").timeout(std::time::Duration::from_secs(1));
        assert_eq!(digests(known[0], 0, 0).next(1, &moved).unwrap(), known[0]);
    }

    #[test]
    fn other_calls_are_refused_with_both_digests() {
        let known = of_calls(5);
        let error = digests(known[0], 5, known[4]).next(1, &call(7)).unwrap_err().to_string();
        let ours = digests(0, 0, 0).next(1, &call(7)).unwrap();
        for part in ["\"trainer\"", "call 1", "\"train\"", &format!("{:016x}", known[0])] {
            assert!(error.contains(part), "{error}");
        }
        assert!(error.contains(&format!("{ours:016x}")), "{error}");
        // A difference in the middle shows at the newest call that the servers know.
        let mut resumed = digests(known[0], 5, known[4]);
        let changed = |number: u64| call(if number == 3 { 30 } else { number as i64 });
        let results: Vec<bool> = (1..=5).map(|n| resumed.next(n, &changed(n)).is_ok()).collect();
        assert_eq!(results, [true, true, true, true, false]);
        // Other functions and other names of inputs are other calls.
        for other in [Call::new("test").feed("batch", 1_i64), Call::new("train").feed("b", 1_i64)] {
            assert!(digests(known[0], 5, known[4]).next(1, &other).is_err());
        }
    }

    #[test]
    fn calls_that_were_left_out_are_not_compared() {
        let known = of_calls(5);
        // Just behind what the servers know, the digest goes on.
        assert_eq!(digests(known[0], 3, known[2]).next(4, &call(4)).unwrap(), known[3]);
        let mut apart = digests(known[0], 3, known[2]);
        assert_eq!(apart.next(5, &call(50)).unwrap(), 0);
        assert_eq!(apart.next(6, &call(60)).unwrap(), 0);
    }
}
