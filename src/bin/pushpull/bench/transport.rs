//! Pulls and pushes of whole models, beside the bare transport.

use super::bed::{At, Model, TestBed, at_once};
use super::ceiling::{Copying, PingPong, RoundTrip, SharedWord, Way};
use super::report::{Report, Row, Unit};
use super::turns::{Pace, take_turns};
use super::{Failure, Options, Transport, bytes_of};

/// Several workers at once go on for so many bytes before they meet.
const TURN_BYTES: usize = 8 << 20;
/// And at most so many times.
const TURN_MOST: usize = 256;

/// Measures these sizes over the transports of the options, or with the daemons that they name.
pub(crate) fn run(
    options: &Options,
    sizes: &[String],
    pace: Pace,
    report: &mut Report,
) -> Result<(), Failure> {
    if let Some(address) = options.address.first() {
        let [size] = sizes else {
            return Err(
                "cannot measure several sizes with --address: the variables of a daemon are \
                        declared once, so say one of --sizes"
                    .into(),
            );
        };
        let at = At::There { addresses: &options.address, rate: options.learning_rate };
        let mut ways = options.transport.iter().filter(|transport| transport.leads_to(address));
        return ways.try_for_each(|&transport| measure(options, at, transport, size, pace, report));
    }
    for &transport in &options.transport {
        for size in sizes {
            let at = At::Here { shards: options.shards };
            measure(options, at, transport, size, pace, report)?;
        }
    }
    Ok(())
}

fn measure(
    options: &Options,
    at: At<'_>,
    transport: Transport,
    size: &str,
    pace: Pace,
    report: &mut Report,
) -> Result<(), Failure> {
    let (bytes, variables) = (bytes_of(size)?, options.variables as usize);
    let replicas = options.replicas as usize;
    let mut bed = TestBed::start(at, transport, Model { bytes, variables }, replicas)?;
    let name = |verb: &str| {
        let mut name = format!("{verb}_{}_{size}", transport.name());
        for (what, count, usual) in [
            ("variables", variables, 1),
            ("replicas", replicas, 1),
            ("shards", options.shards.into(), 1),
        ] {
            if count != usual {
                name.push_str(&format!("_{what}{count}"));
            }
        }
        name
    };
    // A ping-pong is the ceiling of small messages; the bare transport that of large ones.
    if bytes <= 64 && replicas == 1 {
        let ours = || bed.turn(Way::Pull, 1);
        let ((ours, ceiling), beside) = match transport {
            Transport::Shm => {
                let mut ceiling = SharedWord::start();
                (take_turns(pace, ours, || Ok(ceiling.once()))?, "a shared word, two threads")
            }
            _ => {
                let mut ceiling = PingPong::start(transport)?;
                (take_turns(pace, ours, || Ok(ceiling.once()?))?, PingPong::name(transport))
            }
        };
        let (name, unit, amount) = (name("latency_pull"), Unit::Latency, bytes as u64);
        report.row(Row { name, unit, amount, ours, ceiling, beside })?;
    }
    let times = match replicas {
        1 => 1,
        _ => (TURN_BYTES / bytes).clamp(1, TURN_MOST),
    };
    if transport.is_shared() {
        let ceilings = (0..replicas).map(|_| Copying::new(bytes));
        let mut ceilings: Vec<Copying> = ceilings.collect();
        let ceiling = || at_once(&mut ceilings, times, |ceiling| Ok(ceiling.once()));
        let (ours, ceiling) = take_turns(pace, || bed.turn(Way::Pull, times), ceiling)?;
        let (name, unit) = (name("pull"), Unit::Throughput);
        let amount = (bytes * times * replicas) as u64;
        report.row(Row { name, unit, amount, ours, ceiling, beside: "memcpy" })?;
        return bed.check();
    }
    for (verb, way) in [("pull", Way::Pull), ("push", Way::Push)] {
        let ceilings = (0..replicas).map(|_| RoundTrip::start(transport, way, bytes));
        let mut ceilings = ceilings.collect::<Result<Vec<_>, _>>()?;
        let ceiling = || at_once(&mut ceilings, times, |ceiling| Ok(ceiling.once()?));
        let (ours, ceiling) = take_turns(pace, || bed.turn(way, times), ceiling)?;
        let (name, unit) = (name(verb), Unit::Throughput);
        let amount = (bytes * times * replicas) as u64;
        let beside = RoundTrip::name(transport, way);
        report.row(Row { name, unit, amount, ours, ceiling, beside })?;
    }
    bed.check()
}
