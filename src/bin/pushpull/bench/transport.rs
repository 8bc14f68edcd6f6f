//! Pulls and pushes of whole models, beside the bare transport.

use std::time::Duration;

use super::bed::{At, Model, TestBed, at_once};
use super::ceiling::{Applying, Copying, Handing, PingPong, RoundTrip, SharedWord, Way};
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
    let bed = TestBed::start(at, transport, Model { bytes, variables }, replicas)?;
    let mut end = format!("_{}_{size}", transport.name());
    for (what, count, usual) in [
        ("variables", variables, 1),
        ("replicas", replicas, 1),
        ("shards", options.shards.into(), 1),
    ] {
        if count != usual {
            end.push_str(&format!("_{what}{count}"));
        }
    }
    let times = match replicas {
        1 => 1,
        _ => (TURN_BYTES / bytes).clamp(1, TURN_MOST),
    };
    let mut rows = Rows { bed, transport, bytes, replicas, times, end, pace, report };
    // A ping-pong is the ceiling of small messages; the bare transport that of large ones.
    if bytes <= 64 && replicas == 1 {
        rows.latency()?;
    }
    match transport.is_shared() {
        true => rows.in_shared_memory()?,
        false => {
            rows.beside_round_trips("pull", Way::Pull)?;
            rows.beside_round_trips("push", Way::Push)?;
        }
    }
    rows.bed.check()
}

/// The rows of one size over one transport.
struct Rows<'a> {
    bed: TestBed,
    transport: Transport,
    bytes: usize,
    replicas: usize,
    /// How often each replica goes on before they meet.
    times: usize,
    /// How their names end.
    end: String,
    pace: Pace,
    report: &'a mut Report,
}

impl Rows<'_> {
    fn latency(&mut self) -> Result<(), Failure> {
        let (pace, bed) = (self.pace, &mut self.bed);
        let ours = || bed.turn(Way::Pull, 1);
        let ((ours, ceiling), beside) = match self.transport {
            Transport::Shm => {
                let mut ceiling = SharedWord::start(|| ());
                (take_turns(pace, ours, || ceiling.once())?, "a shared word, two threads")
            }
            transport => {
                let mut ceiling = PingPong::start(transport)?;
                (take_turns(pace, ours, || Ok(ceiling.once()?))?, PingPong::name(transport))
            }
        };
        let (name, unit, amount) =
            (format!("latency_pull{}", self.end), Unit::Latency, self.bytes as u64);
        self.report.row(Row { name, unit, amount, ours, ceiling, beside })?;
        Ok(())
    }

    /// Values are read where they lie, gradients are written where they are read; and those that lie
    /// elsewhere are sent, as over the bare transport.
    fn in_shared_memory(&mut self) -> Result<(), Failure> {
        let bytes = self.bytes;
        let copying = || Ok(Copying::new(bytes));
        self.beside("pull", Way::Pull, copying, |ceiling| Ok(ceiling.once()), "memcpy")?;
        let applying = || Ok(Applying::new(bytes)?);
        self.beside(
            "push",
            Way::Push,
            applying,
            |ceiling| Ok(ceiling.once()),
            "the rule in place",
        )?;
        if self.replicas == 1 {
            self.handed()?;
        }
        self.bed.use_up_push_slots();
        self.beside_round_trips("push_copied", Way::Push)
    }

    /// What a push would be without its messages.
    fn handed(&mut self) -> Result<(), Failure> {
        let (mut handing, mut applying) = (Handing::start(self.bytes)?, Applying::new(self.bytes)?);
        let (ours, ceiling) = take_turns(self.pace, || handing.once(), || Ok(applying.once()))?;
        let (name, unit) = (format!("handed{}", self.end), Unit::Throughput);
        let (amount, beside) = (self.bytes as u64, "the rule in place");
        self.report.row(Row { name, unit, amount, ours, ceiling, beside })?;
        Ok(())
    }

    fn beside_round_trips(&mut self, verb: &str, way: Way) -> Result<(), Failure> {
        let (transport, bytes) = (self.transport, self.bytes);
        let start = || Ok(RoundTrip::start(transport, way, bytes)?);
        self.beside(
            verb,
            way,
            start,
            |ceiling| Ok(ceiling.once()?),
            RoundTrip::name(transport, way),
        )
    }

    /// All replicas at once, in turns with as many ceilings at once.
    fn beside<C: Send>(
        &mut self,
        verb: &str,
        way: Way,
        start: impl Fn() -> Result<C, Failure>,
        once: impl Fn(&mut C) -> Result<Duration, Failure> + Sync,
        beside: &'static str,
    ) -> Result<(), Failure> {
        let (bed, times, replicas) = (&mut self.bed, self.times, self.replicas);
        let mut ceilings = (0..replicas).map(|_| start()).collect::<Result<Vec<C>, _>>()?;
        let ceiling = || at_once(&mut ceilings, times, &once);
        let (ours, ceiling) = take_turns(self.pace, || bed.turn(way, times), ceiling)?;
        let (name, unit) = (format!("{verb}{}", self.end), Unit::Throughput);
        let amount = (self.bytes * times * replicas) as u64;
        self.report.row(Row { name, unit, amount, ours, ceiling, beside })?;
        Ok(())
    }
}
