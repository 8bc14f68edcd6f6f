//! Runs the servers and the worker of a case.

use std::fmt::{self, Display};

use pushpull::blocking::Worker;
use pushpull::variable::{DType, Element, bf16, f16};
use pushpull::worker::Codec;
use pushpull::{
    ClusterSpec, Mode, Params, Ps, PsConfig, Push, Sgd, Synchronous, TaskId, VariableSpec,
    WorkerConfig,
};

use crate::counting::check_counting;

/// One configuration of a training run: mode, transport, number of shards, size of the variables
/// and encoding.
#[derive(Clone, Copy)]
pub(crate) struct AllocationCase {
    pub(crate) synchronous: bool,
    pub(crate) unix: bool,
    pub(crate) shards: u16,
    pub(crate) elements: u64,
    pub(crate) form: Form,
    /// Steps that are counted.
    pub(crate) steps: usize,
}

/// The element type of the variables, and the encodings of gradients and values.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    pub(crate) name: &'static str,
    pub(crate) dtype: DType,
    pub(crate) codec: Option<Codec>,
    pub(crate) values: Option<Codec>,
}

pub(crate) const PLAIN: Form =
    Form { name: "as it is", dtype: DType::F32, codec: None, values: None };

impl Display for AllocationCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.synchronous { "synchronous" } else { "asynchronous" };
        let transport = if self.unix { "uds" } else { "tcp" };
        let AllocationCase { shards, elements, form, .. } = self;
        write!(f, "{}, {mode}, {transport}, {shards} shards, {elements} elements", form.name)
    }
}

/// An element type of the variables.
pub(crate) trait GradientElement: Element {
    fn of(value: f32) -> Self;
}

impl GradientElement for f32 {
    fn of(value: f32) -> f32 {
        value
    }
}

impl GradientElement for f64 {
    fn of(value: f32) -> f64 {
        value.into()
    }
}

impl GradientElement for f16 {
    fn of(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

impl GradientElement for bf16 {
    fn of(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

/// Writes the first thousand elements of a gradient: values that differ in each step, some of them
/// small.
pub(crate) fn write<T: GradientElement>(gradient: &mut [T], step: usize) {
    for (index, element) in gradient.iter_mut().enumerate().take(1_000) {
        let residue = (index * 37 + step * 11) % 101;
        *element = T::of(residue as f32 / 50.0 - 1.0);
    }
}

/// Trains these variables on the servers of a case.
pub(crate) fn training<R>(
    case: &AllocationCase,
    variables: &[VariableSpec],
    train: impl FnOnce(&mut Worker, &mut Params) -> R,
) -> R {
    let directory = tempfile::tempdir().unwrap();
    let address = match case.unix {
        true => format!("unix:{}", directory.path().join("ps.sock").display()),
        false => "127.0.0.1:0".to_owned(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(Ps::listen(&address)).unwrap();
    let ps = [listener.address()];
    let workers = ["127.0.0.1:1"];
    let cluster = ClusterSpec::builder().job("ps", ps).job("worker", workers).build().unwrap();
    let mode = match case.synchronous {
        true => Synchronous::new(1).into(),
        false => Mode::default(),
    };
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1e-3));
    let server = listener.start(config.mode(mode).shards(case.shards)).unwrap();
    let config = WorkerConfig::new(cluster, TaskId::worker(0));
    let config = config.codec("*", case.form.codec).pull_codec(case.form.values);
    let mut worker = Worker::connect(config).unwrap();
    let mut params = check_counting(|| worker.join(variables, |_| ()).unwrap());
    let result = train(&mut worker, &mut params);
    worker.leave().unwrap();
    runtime.block_on(server.serve(async {})).unwrap();
    result
}

/// Checks that a push counts.
pub(crate) fn check_counted(push: &Push) {
    assert!(matches!(push, Push::Applied { .. } | Push::Accepted { .. }), "{push:?}");
}
