//! A job `local`: each of its tasks holds variables, computes and trains.

use pushpull::blocking::{FunctionServer, Ps, Reader};
use pushpull::server::PsListener;
use pushpull::services::{
    Call, Coordinator, CoordinatorConfig, FunctionClient, FunctionClientConfig,
    FunctionServerConfig, Functions,
};
use pushpull::variable::Initializer;
use pushpull::{ClusterSpec, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::services::cluster::{LONG, connect};

fn local(index: u32) -> TaskId {
    TaskId::new("local", index)
}

/// The tasks of a job `local`, each with a parameter server and functions beside it.
struct LocalJob {
    /// The cluster as the tasks know it. It lists no worker.
    cluster: ClusterSpec,
    _tasks: Vec<(Ps, FunctionServer)>,
}

impl LocalJob {
    fn start(tasks: u32, functions: &Functions) -> LocalJob {
        let listeners: Vec<_> = (0..tasks).map(|_| Ps::listen("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(PsListener::address);
        let cluster = ClusterSpec::builder().job("local", addresses).build().unwrap();
        let start = |(index, listener): (u32, PsListener)| {
            let config =
                FunctionServerConfig::new(cluster.clone(), local(index), functions.clone());
            let server = FunctionServer::beside(config).unwrap();
            let config = PsConfig::new(cluster.clone(), local(index), Sgd::new(1.0));
            (Ps::start(listener.services(server.peers()), config).unwrap(), server)
        };
        let tasks = (0..).zip(listeners).map(start).collect();
        LocalJob { cluster, _tasks: tasks }
    }

    fn address(&self, index: u32) -> &str {
        self.cluster.task_address("local", index).unwrap()
    }

    /// Declares and initializes variables.
    fn declare(&self, variables: &[VariableSpec]) {
        connect(self.address(0)).declare(variables, |_| ()).unwrap();
    }

    /// Returns the step of the newest values, and the values of each variable.
    fn values<const N: usize>(&self, names: [&str; N]) -> (u64, [Vec<f32>; N]) {
        let config = WorkerConfig::new(self.cluster.clone(), TaskId::new("reader", 0));
        let mut reader = Reader::connect(config).unwrap();
        let mut params = reader.params();
        let step = reader.pull(&mut params).unwrap();
        (step, names.map(|name| params.view::<f32>(name).unwrap().to_vec()))
    }
}

fn on_task(name: &str, task: u32, value: f64) -> VariableSpec {
    let variable = VariableSpec::f32(name, [2]).unwrap();
    let variable = variable.device(format!("/job:local/task:{task}").parse().unwrap());
    variable.initializer(Initializer::Constant(value))
}

/// Adds the input `by` to every variable, and returns the first values before.
fn functions() -> Functions {
    Functions::new().elementwise().add("step", |call| {
        let by: f32 = call.input("by")?.element()?;
        call.params()?;
        let mut gradients = call.gradients()?;
        for name in ["zero", "one"] {
            gradients.view_mut::<f32>(name)?.fill(-by);
        }
        call.push(gradients)
    })
}

#[test]
fn a_client_of_any_task_computes_with_variables_of_all_tasks() {
    let job = LocalJob::start(3, &functions());
    job.declare(&[on_task("zero", 0, 6.0), on_task("one", 1, 2.0), on_task("two", 2, 3.0)]);
    for target in 0..3 {
        let client = connect(job.address(target));
        assert_eq!((client.target(), client.cluster()), (&local(target), job.cluster.clone()));
        for task in 0..3 {
            let on = format!("/job:local/task:{task}");
            let of = |name: &str, b: &str| {
                Call::new(name).on(&on).variable("a", "zero").variable("b", b)
            };
            let [ratio, product] = client.run([of("div", "one"), of("mul", "two")]).unwrap();
            assert_eq!(ratio.view::<f32>().unwrap(), [3.0; 2], "task {task} for {target}");
            assert_eq!(product.view::<f32>().unwrap(), [18.0; 2], "task {task} for {target}");
        }
    }
}

#[test]
fn functions_beside_the_variables_train_them() {
    let job = LocalJob::start(2, &functions());
    job.declare(&[on_task("zero", 0, 0.0), on_task("one", 1, 1.0)]);
    let client = connect(job.address(0));
    for step in 1..=6_i64 {
        // Both tasks train in turn, each by a session of its own.
        let on = format!("/job:local/task:{}", step % 2);
        let pushed = client.call(Call::new("step").feed("by", 0.5_f32).on(&on)).unwrap();
        assert_eq!(pushed.get("outcome").unwrap().text().unwrap(), "applied");
        assert_eq!(pushed.get("step").unwrap().element::<i64>(), Ok(step));
    }
    assert_eq!(job.values(["zero", "one"]), (6, [vec![3.0; 2], vec![4.0; 2]]));
}

#[test]
fn a_coordinator_trains_on_the_tasks_that_hold_the_variables() {
    let job = LocalJob::start(2, &functions());
    job.declare(&[on_task("zero", 0, 0.0), on_task("one", 1, 0.0)]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client =
            FunctionClient::connect(FunctionClientConfig::new(job.address(1)).timeout(LONG))
                .await
                .unwrap();
        let config = CoordinatorConfig::new().job("local");
        let coordinator = Coordinator::resume(client, "training", config).await.unwrap();
        for _ in 0..20 {
            let call = Call::new("step").feed("by", 1.0_f32);
            let _ = coordinator.schedule(call).await.unwrap();
        }
        coordinator.join().await.unwrap();
        coordinator.close().await.unwrap();
    });
    assert_eq!(job.values(["zero", "one"]), (20, [vec![20.0; 2], vec![20.0; 2]]));
}
