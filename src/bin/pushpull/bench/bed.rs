//! A server, in this process or elsewhere, and workers that pull from it and push to it.

use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::error::Chain;
use pushpull::protocol::limits::BUFFER_SLOTS_MAX;
use pushpull::security::Credentials;
use pushpull::{
    ClusterSpec, Gradients, Params, Ps, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig,
};

use super::ceiling::PayloadDirection;
use super::tls::BenchKeys;
use super::{BenchError, BenchFolder, Transport};

/// Learning rate of a server in this process. Multiples of 0.5 are exact in f32 below 2^23, so
/// fewer than 2^24 pushes add up exactly.
pub(crate) const RATE: f64 = 0.5;

/// The model that is pulled and pushed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BenchModel {
    /// Size of all variables together in bytes, 4 per element.
    pub(crate) bytes: usize,
    pub(crate) variables: usize,
}

impl BenchModel {
    fn names(self) -> impl Iterator<Item = String> {
        (0..self.variables).map(|variable| format!("w{variable}"))
    }

    /// Returns the variables. The first ones are one element longer if the elements do not divide
    /// evenly.
    fn specs(self) -> Result<Vec<VariableSpec>, BenchError> {
        let elements = self.bytes / 4;
        if self.variables > elements {
            let BenchModel { bytes, variables } = self;
            let fault = format!("--variables {variables}: {bytes} bytes have fewer elements");
            return Err(fault.into());
        }
        let more = elements % self.variables;
        let length = |place| (elements / self.variables + usize::from(place < more)) as u64;
        let spec = |(place, name): (usize, String)| VariableSpec::f32(&name, [length(place)]);
        Ok(self.names().enumerate().map(spec).collect::<Result<_, _>>()?)
    }
}

/// The server to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'a> {
    /// A server in this process with this number of shards.
    InProcess { shards: u16 },
    /// Daemons at these addresses, which run plain gradient descent with this rate.
    Daemons { addresses: &'a [String], rate: f64 },
}

/// A server and its workers.
pub(crate) struct TestBed {
    model: BenchModel,
    cluster: ClusterSpec,
    credentials: Option<Credentials>,
    replicas: Vec<WorkerReplica>,
    rate: f64,
    /// Value of every element and global step before the first push.
    before: (f32, u64),
    _server: Option<Ps>,
    _folder: Option<BenchFolder>,
    _keys: Option<BenchKeys>,
}

/// One worker and its copy of the model.
struct WorkerReplica {
    worker: Worker,
    reader: Reader,
    params: Params,
    names: Vec<String>,
    /// Gradients that are never pushed. They occupy all buffer slots, if any.
    unpushed: Vec<Gradients>,
    pushes: u64,
}

impl TestBed {
    pub(crate) fn start(
        at: Target<'_>,
        transport: Transport,
        model: BenchModel,
        replicas: usize,
    ) -> Result<TestBed, BenchError> {
        let workers = (1..=replicas).map(|port| format!("127.0.0.1:{port}"));
        let builder = ClusterSpec::builder().job("worker", workers);
        let keys = match (transport, at) {
            (Transport::Tls, Target::InProcess { .. }) => Some(BenchKeys::new("transport")?),
            _ => None,
        };
        let credentials = keys.as_ref().map(BenchKeys::credentials).transpose()?;
        let (cluster, server, rate, folder) = match at {
            Target::Daemons { addresses, rate } => {
                (builder.job("ps", addresses).build()?, None, rate, None)
            }
            Target::InProcess { shards } => {
                let runtime = tokio::runtime::Builder::new_current_thread().build()?;
                let (address, folder) = transport.address("transport")?;
                let listener = runtime.block_on(Ps::listen(&address))?;
                let cluster = builder.job("ps", [listener.address()]).build()?;
                let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(RATE));
                let config = config.shards(shards).network(transport.network());
                let config = config.credentials(credentials.clone());
                (cluster, Some(listener.start(config)?), RATE, folder)
            }
        };
        let specs = model.specs()?;
        let replicas = (0..replicas)
            .map(|task| {
                let config = WorkerConfig::new(cluster.clone(), TaskId::worker(task as u32));
                let config = config.shared_memory(transport.is_shared());
                WorkerReplica::join(config.credentials(credentials.clone()), model, &specs)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let before = (0.0, 0);
        let mut bed = TestBed {
            model,
            cluster,
            credentials,
            replicas,
            rate,
            before,
            _server: server,
            _folder: folder,
            _keys: keys,
        };
        bed.before = bed.every_element()?;
        Ok(bed)
    }

    /// Returns the cluster of the server.
    #[allow(dead_code, reason = "a suite of the package benches uses it")]
    pub(crate) fn cluster(&self) -> &ClusterSpec {
        &self.cluster
    }

    /// Has all replicas pull or push this many times, concurrently. Returns the mean time of one
    /// replica.
    pub(crate) fn turn(
        &mut self,
        direction: PayloadDirection,
        times: usize,
    ) -> Result<Duration, BenchError> {
        let once = |replica: &mut WorkerReplica| match direction {
            PayloadDirection::Pull => replica.pull(),
            PayloadDirection::Push => replica.push(),
        };
        at_once(&mut self.replicas, times, once)
    }

    /// Takes all buffer slots, so that gradients are sent over the socket from now on.
    pub(crate) fn use_up_buffer_slots(&mut self) {
        for replica in &mut self.replicas {
            replica.unpushed = (0..BUFFER_SLOTS_MAX).map(|_| replica.worker.gradients()).collect();
        }
    }

    /// Checks that the values are the sum of the pushes and that the step counts them.
    pub(crate) fn check(self) -> Result<(), BenchError> {
        let pushes: u64 = self.replicas.iter().map(|replica| replica.pushes).sum();
        let rate = self.rate as f32;
        // Subtracted one by one in f32, as the server does.
        let expected = (0..pushes).fold(self.before.0, |value, _| value - rate);
        let (value, step) = self.every_element()?;
        let begun = self.before.1;
        if step != begun + pushes {
            return Err(format!("{pushes} pushes took the step from {begun} to {step}").into());
        }
        match value == expected {
            true => Ok(()),
            false => Err(format!("the elements are {value} instead of {expected}").into()),
        }
    }

    /// Returns the value of every element and the step. Fails if the elements differ.
    fn every_element(&self) -> Result<(f32, u64), BenchError> {
        let config = WorkerConfig::new(self.cluster.clone(), TaskId::worker(0));
        let mut reader = Reader::connect(config.credentials(self.credentials.clone()))?;
        let mut params = reader.params();
        let step = reader.pull(&mut params)?;
        let mut first = None;
        for name in self.model.names() {
            let values = params.view::<f32>(&name)?;
            let expected = *first.get_or_insert(values[0]);
            if let Some(place) = values.iter().position(|&value| value != expected) {
                let value = values[place];
                return Err(format!("element {place} of {name} is {value}, not {expected}").into());
            }
        }
        Ok((first.unwrap_or_default(), step))
    }
}

impl WorkerReplica {
    fn join(
        config: WorkerConfig,
        model: BenchModel,
        specs: &[VariableSpec],
    ) -> Result<WorkerReplica, BenchError> {
        let mut worker = Worker::connect(config.clone())?;
        worker.join(specs, |_| ())?;
        let reader = Reader::connect(config)?;
        let params = reader.params();
        let names = model.names().collect();
        let unpushed = Vec::new();
        let pushes = 0;
        Ok(WorkerReplica { worker, reader, params, names, unpushed, pushes })
    }

    fn pull(&mut self) -> Result<Duration, BenchError> {
        let start = Instant::now();
        self.reader.pull(&mut self.params)?;
        Ok(start.elapsed())
    }

    /// Measures one push until it is acknowledged as applied. Filling the gradients, the work of a
    /// model, is not measured.
    fn push(&mut self) -> Result<Duration, BenchError> {
        let token = self.worker.token()?.ok_or("the training has ended")?;
        let mut gradients = self.worker.gradients();
        for name in &self.names {
            gradients.view_mut_unfilled::<f32>(name)?.fill(1.0);
        }
        let start = Instant::now();
        self.worker.push(token, gradients)?;
        let elapsed = start.elapsed();
        self.pushes += 1;
        Ok(elapsed)
    }
}

/// Runs `once` this many times on each item, one thread per item. Returns the mean over the items
/// of the summed durations that `once` reports.
pub(crate) fn at_once<T: Send>(
    several: &mut [T],
    times: usize,
    once: impl Fn(&mut T) -> Result<Duration, BenchError> + Sync,
) -> Result<Duration, BenchError> {
    let again = |one: &mut T| (0..times).map(|_| once(one)).sum::<Result<Duration, BenchError>>();
    if let [one] = several {
        return again(one);
    }
    let again = &again;
    let count = several.len() as u32;
    let sum = std::thread::scope(|scope| {
        // A `BenchError` cannot be sent between threads: its text is.
        let turn =
            |one| scope.spawn(move || again(one).map_err(|error| Chain(&*error).to_string()));
        let threads: Vec<_> = several.iter_mut().map(turn).collect();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err("a worker thread panicked".to_owned()))
        };
        threads.into_iter().map(ended).sum::<Result<Duration, String>>()
    })?;
    Ok(sum / count)
}
