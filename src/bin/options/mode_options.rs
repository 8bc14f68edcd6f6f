//! [`ModeOptions`]: the update mode, as `--synchronous A/R` or as the classic `--issync 0|1`.

use std::error::Error;
use std::fmt;
use std::str::FromStr;

use clap::{ArgGroup, Args, value_parser};
use pushpull::{ClusterSpec, Synchronous};

/// The flags that choose the update mode.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Synchronous training")]
#[command(group(ArgGroup::new("mode").args(["synchronous", "issync"]).multiple(true)))]
pub(crate) struct ModeOptions {
    /// Make each step of the mean of A gradients of R replicas, such as 4/5 [default: none]
    #[arg(long, value_name = "A/R")]
    pub(crate) synchronous: Option<Replicas>,
    /// 1 for --synchronous N/N with the N workers of the cluster, 0 for asynchronous
    #[arg(long, value_name = "0|1", value_parser = value_parser!(u8).range(0..=1))]
    pub(crate) issync: Option<u8>,
}

/// The number of gradients in a synchronous step, and the number of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replicas {
    /// The number of gradients in a step.
    pub(crate) aggregate: u32,
    /// The number of replicas.
    pub(crate) total: u32,
}

/// The reason why the flags choose no mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModeError {
    /// `--issync 1` for a cluster that lists no workers.
    NoWorkers,
    /// `--issync` and `--synchronous` choose different modes.
    Disagreement {
        /// The value of `--issync`.
        issync: u8,
        /// The value of `--synchronous`.
        synchronous: Replicas,
        /// The number of workers that the cluster lists.
        workers: u32,
    },
}

impl ModeOptions {
    /// Returns the replicas of a synchronous step; `None` in asynchronous mode. `workers` is the
    /// number of workers that the cluster lists.
    pub(crate) fn replicas(&self, workers: u32) -> Result<Option<Replicas>, ModeError> {
        let implied = match self.issync {
            None => return Ok(self.synchronous),
            Some(0) => None,
            Some(_) if workers == 0 => return Err(ModeError::NoWorkers),
            Some(_) => Some(Replicas { aggregate: workers, total: workers }),
        };
        match (self.issync, self.synchronous) {
            (Some(issync), Some(synchronous)) if implied != Some(synchronous) => {
                Err(ModeError::Disagreement { issync, synchronous, workers })
            }
            _ => Ok(implied),
        }
    }
}

impl Replicas {
    /// Returns the mode with these replicas.
    pub(crate) fn mode(self) -> Synchronous {
        Synchronous::new(self.aggregate).total_num_replicas(self.total)
    }
}

impl FromStr for Replicas {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Replicas, &'static str> {
        let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
        match text.split_once('/').map(|(a, r)| (number(a), number(r))) {
            Some((Some(aggregate), Some(total))) => Ok(Replicas { aggregate, total }),
            _ => Err("expected A/R, two whole numbers from 1 on, such as 4/5"),
        }
    }
}

impl fmt::Display for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.aggregate, self.total)
    }
}

impl fmt::Display for ModeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModeError::NoWorkers => f.write_str(
                "--issync 1: the cluster lists 0 workers, so no gradient can be aggregated: give \
                 --worker-hosts, or --synchronous A/R",
            ),
            ModeError::Disagreement { issync: 0, synchronous, .. } => write!(
                f,
                "--issync 0 --synchronous {synchronous}: --issync 0 is the asynchronous mode"
            ),
            ModeError::Disagreement { issync, synchronous, workers } => write!(
                f,
                "--issync {issync} --synchronous {synchronous}: with {workers} workers --issync \
                 {issync} is --synchronous {workers}/{workers}"
            ),
        }
    }
}

impl Error for ModeError {}

/// Returns the number of replicas that a cluster lists: its workers, and its chief if that is a job
/// of its own.
pub(crate) fn listed_workers(cluster: &ClusterSpec) -> u32 {
    let jobs = ["chief", "worker"].map(|job| cluster.num_tasks(job).unwrap_or(0));
    // A job has at most `ClusterSpec::TASKS_MAX` tasks.
    jobs.iter().sum::<usize>() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_two_positive_integers() {
        assert_eq!("3/4".parse(), Ok(Replicas { aggregate: 3, total: 4 }));
        for text in ["", "3", "3/", "/4", "0/4", "3/0", "3/4/5", "-3/4", "3 / 4", "4294967296/1"] {
            assert!(text.parse::<Replicas>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn issync_is_all_workers_or_none_and_must_agree_with_synchronous() {
        let replicas = |aggregate, total| Some(Replicas { aggregate, total });
        let disagreement = |issync, workers| {
            let synchronous = Replicas { aggregate: 3, total: 4 };
            Err(ModeError::Disagreement { issync, synchronous, workers })
        };
        let cases = [
            (None, None, 2, Ok(None)),
            (None, replicas(3, 4), 2, Ok(replicas(3, 4))),
            (Some(0), None, 0, Ok(None)),
            (Some(1), None, 3, Ok(replicas(3, 3))),
            (Some(1), None, 0, Err(ModeError::NoWorkers)),
            (Some(1), replicas(3, 3), 3, Ok(replicas(3, 3))),
            (Some(1), replicas(3, 4), 4, disagreement(1, 4)),
            (Some(0), replicas(3, 4), 4, disagreement(0, 4)),
        ];
        for (issync, synchronous, workers, expected) in cases {
            let options = ModeOptions { synchronous, issync };
            assert_eq!(options.replicas(workers), expected, "{options:?}, {workers} workers");
        }
    }

    #[test]
    fn errors_name_the_flags_with_their_values() {
        let said = |issync, workers| {
            let synchronous = Replicas { aggregate: 3, total: 4 };
            ModeError::Disagreement { issync, synchronous, workers }.to_string()
        };
        assert!(ModeError::NoWorkers.to_string().starts_with("--issync 1: "));
        assert!(said(0, 4).starts_with("--issync 0 --synchronous 3/4: "));
        assert!(said(1, 4).ends_with("with 4 workers --issync 1 is --synchronous 4/4"));
    }

    #[test]
    fn a_chief_of_its_own_is_a_replica() {
        let listed = |text: &str| listed_workers(&text.parse().unwrap());
        assert_eq!(listed("ps=a:1"), 0);
        assert_eq!(listed("ps=a:1;worker=b:1,c:1"), 2);
        assert_eq!(listed("ps=a:1;chief=d:1;worker=b:1,c:1"), 3);
    }
}
