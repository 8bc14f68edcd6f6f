//! [`RingError`]: why a ring cannot form, or why an operation on it has failed.

use std::time::Duration;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{Collective, RingEnd, RingOperation};
use thiserror::Error;

use crate::element::ElementKind;

/// Why a ring cannot form, or why an operation on it has failed.
///
/// - [`RingError::Lost`], [`RingError::Difference`], [`RingError::GivenUp`], [`RingError::Left`] and
///   [`RingError::Regrouped`] reach every rank of the ring. Each rank of one ring gets the same.
/// - After [`RingError::Lost`], [`RingError::Left`], [`RingError::GivenUp`] and
///   [`RingError::Regrouped`] the others may go on: [`crate::Ring::shrink`].
/// - [`RingError::Fenced`] ends this process: the others go on without it.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RingError {
    /// A setting of this program is invalid.
    #[error("cannot join a ring: {setting} is {value}, which must be {expected}")]
    Config {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A resource of this machine is missing: a folder, a socket, a thread.
    #[error("cannot {doing}: {cause}")]
    System {
        /// The attempt.
        doing: String,
        /// The cause, in words.
        cause: String,
    },
    /// The rendezvous cannot be reached.
    #[error("no rendezvous at {address} within {within:?}: {cause}")]
    NoRendezvous {
        /// The address.
        address: String,
        /// The time that the rank has tried.
        within: Duration,
        /// The last failure, in words.
        cause: String,
    },
    /// Some members have not come.
    #[error(
        "the ring has not formed within {within:?}: {came} of {size} ranks have come; \
         missing: {missing:?}"
    )]
    NotFormed {
        /// The members that have come.
        came: u32,
        /// The members of the ring.
        size: u32,
        /// The first indices that have not come.
        missing: Vec<u32>,
        /// The time that the rank has waited.
        within: Duration,
    },
    /// The rendezvous or a neighbour refuses this rank.
    #[error("cannot join the ring: {refusal}")]
    Refused {
        /// The refusal, in words.
        refusal: String,
    },
    /// A rank is lost: it was silent for a lease, or its connection broke.
    #[error("rank {rank} on {host} is lost, silent for {since:?}{}", Detail(.detail))]
    Lost {
        /// The rank.
        rank: u32,
        /// Its host.
        host: String,
        /// How long it had been silent when it was declared lost.
        since: Duration,
        /// The fault of its connection; empty if it was silent.
        detail: String,
    },
    /// Two ranks perform different operations.
    #[error(
        "operation {number} differs: rank {rank} performs {operation}, \
         rank {other_rank} performs {other}"
    )]
    Difference {
        /// The number of the operation since the ring has formed, from 1.
        number: u64,
        /// The one rank.
        rank: u32,
        /// Its operation.
        operation: String,
        /// The other rank.
        other_rank: u32,
        /// The operation of that.
        other: String,
    },
    /// A rank has given an operation up: its future was dropped, its ring was dropped, it refuses
    /// values, or it has waited for too long.
    #[error("rank {rank} has given up: {detail}")]
    GivenUp {
        /// The rank.
        rank: u32,
        /// The reason.
        detail: String,
    },
    /// A rank has left the ring while this one still uses it.
    #[error("rank {rank} has left the ring")]
    Left {
        /// The rank.
        rank: u32,
    },
    /// The members form another ring: [`crate::Ring::shrink`] enters it.
    #[error("the ring forms again")]
    Regrouped,
    /// The others have declared this rank lost, or another process has taken its place. They go on
    /// without this process, which can only end. The detail names the epoch after which they do.
    #[error("this rank is fenced: {detail}")]
    Fenced {
        /// The reason.
        detail: String,
    },
    /// A value is NaN or infinite, and the ring refuses such values.
    #[error("cannot {doing}: element {element} is {value}")]
    NonFinite {
        /// The operation.
        doing: String,
        /// The index of the element.
        element: usize,
        /// The value.
        value: f64,
    },
    /// The arguments of an operation do not fit each other or the ring.
    #[error("cannot {doing}: {fault}")]
    Argument {
        /// The operation.
        doing: String,
        /// The fault.
        fault: String,
    },
}

/// Displays a detail behind a colon, if there is one.
struct Detail<'a>(&'a str);

impl std::fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            "" => Ok(()),
            detail => write!(f, ": {detail}"),
        }
    }
}

impl RingError {
    /// Returns whether the other members may form another ring after this error.
    pub fn may_shrink(&self) -> bool {
        matches!(
            self,
            RingError::Lost { .. }
                | RingError::Left { .. }
                | RingError::GivenUp { .. }
                | RingError::Regrouped
        )
    }

    /// Returns the error of the ring of this epoch that is over, for one of its ranks.
    pub(crate) fn of_end(end: &RingEnd, own_rank: u32, epoch: u64) -> RingError {
        match end {
            RingEnd::Lost { rank, silent_ms, detail, .. } if *rank == own_rank => {
                let cause = match detail.as_str() {
                    "" => {
                        let silent = Duration::from_millis(*silent_ms);
                        format!("the others have not heard from it for {silent:?}")
                    }
                    detail => detail.to_owned(),
                };
                RingError::Fenced {
                    detail: format!(
                        "{cause}, and go on without it in rings after epoch {epoch}; end this \
                         process: if it is started again, they take it in when they regroup"
                    ),
                }
            }
            RingEnd::Lost { rank, host, silent_ms, detail } => RingError::Lost {
                rank: *rank,
                host: host.as_str().to_owned(),
                since: Duration::from_millis(*silent_ms),
                detail: detail.as_str().to_owned(),
            },
            RingEnd::Difference { number, rank, operation, other_rank, other } => {
                RingError::Difference {
                    number: *number,
                    rank: *rank,
                    operation: describe(operation),
                    other_rank: *other_rank,
                    other: describe(other),
                }
            }
            RingEnd::GivenUp { rank, detail } => {
                RingError::GivenUp { rank: *rank, detail: detail.as_str().to_owned() }
            }
            RingEnd::Left { rank } => RingError::Left { rank: *rank },
            RingEnd::Regrouped {} => RingError::Regrouped,
        }
    }

    /// Returns the error of a member that is refused after the ring of this epoch; 0 for none.
    pub(crate) fn of_refusal(refusal: &Refusal, id: &str, epoch: u64) -> RingError {
        match refusal {
            Refusal::Fenced { .. } => RingError::Fenced {
                detail: format!(
                    "a newer process has its id {id:?}, and the others go on with that one after \
                     epoch {epoch}; end this process, or give it another id"
                ),
            },
            refusal => RingError::Refused { refusal: refusal.to_string() },
        }
    }
}

/// Describes an operation, as in `all-reduce (sum) of "w": 10 x f32 as int8`.
pub(crate) fn describe(operation: &RingOperation) -> String {
    let verb = match operation.collective {
        Collective::ReduceSum {} => "all-reduce (sum)".to_owned(),
        Collective::ReduceMean {} => "all-reduce (mean)".to_owned(),
        Collective::ReduceMin {} => "all-reduce (min)".to_owned(),
        Collective::ReduceMax {} => "all-reduce (max)".to_owned(),
        Collective::ScatterSum {} => "reduce-scatter (sum)".to_owned(),
        Collective::ScatterMean {} => "reduce-scatter (mean)".to_owned(),
        Collective::ScatterMin {} => "reduce-scatter (min)".to_owned(),
        Collective::ScatterMax {} => "reduce-scatter (max)".to_owned(),
        Collective::Gather {} => "all-gather".to_owned(),
        Collective::Broadcast { root } => format!("broadcast from rank {root}"),
        Collective::Barrier {} => match operation.name.as_str() {
            "" => return "barrier".to_owned(),
            name => return format!("barrier {name:?}"),
        },
    };
    let of = match operation.name.as_str() {
        "" => String::new(),
        name => format!(" of {name:?}"),
    };
    let kind = match ElementKind::from_code(operation.elements) {
        Some(kind) => kind.to_string(),
        None => format!("elements of code {}", operation.elements),
    };
    let codec = operation.codec.map_or(String::new(), |codec| format!(" as {}", codec.codec()));
    format!("{verb}{of}: {} x {kind}{codec}", operation.count)
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::ClientEpoch;
    use pushpull_common::protocol::refusal::Detail;
    use pushpull_common::protocol::wire::Text;

    use super::*;

    #[test]
    fn a_fenced_rank_reads_who_goes_on_and_what_to_do() {
        let lost = |silent_ms, detail| RingEnd::Lost {
            rank: 1,
            host: Text::clipped("host"),
            silent_ms,
            detail: Detail::clipped(detail),
        };
        let go_on = "and go on without it in rings after epoch 7; end this process: if it is started \
                     again, they take it in when they regroup";
        let table = [
            (lost(1500, ""), "the others have not heard from it for 1.5s"),
            (lost(0, "another process has taken its id"), "another process has taken its id"),
        ];
        for (end, cause) in table {
            let expected = format!("this rank is fenced: {cause}, {go_on}");
            assert_eq!(RingError::of_end(&end, 1, 7).to_string(), expected);
        }
        let refusal = Refusal::Fenced { epoch: ClientEpoch(50), current: ClientEpoch(51) };
        assert_eq!(
            RingError::of_refusal(&refusal, "rank 1", 7).to_string(),
            "this rank is fenced: a newer process has its id \"rank 1\", and the others go on with \
             that one after epoch 7; end this process, or give it another id"
        );
    }
}
